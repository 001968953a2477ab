"""The work that hops carry: cutting a long step into several hops, and what follows from one or comes of all."""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeGuard, TypeVar

from google.protobuf.message import Message

from onesweep.stages.model.draft_tree import Draft
from onesweep.stages.model.prefill import MAX_PREFILL_CHUNKS, prefill_chunks, read_lengths
from onesweep.stages.model.scoring import candidates_together
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.status import internal, protocol_refusal

# Of hops and their answers. Protocol 1 had one `Step` for all that a pipeline does; 2 had scores of every symbol, and
# no batches; 3 had no pictures; 4 drew symbols from the whole distribution only; 5 had drafts of the router only; 6 had
# deadlines by the wall clock; 7 told the lengths of reads where 8 tells how long the prompt is; 8 had
# rejection sampling, and receipts.
PROTOCOL = 9
hops_refusal = partial(protocol_refusal, ours=PROTOCOL, subject="hops")

# One step of a pipeline, which travels in one hop or, with `Prefill`s before it or in batches, in several.
Step = stage_pb2.Decode | stage_pb2.Verify | stage_pb2.Score
Work = stage_pb2.Sweep | Step
RingStep = stage_pb2.Decode | stage_pb2.Verify  # after which the last host may begin the next one
StageWork = stage_pb2.Prefill | Step
PictureWork = stage_pb2.Draw | stage_pb2.Denoise | stage_pb2.Consult
AnyWork = stage_pb2.Sweep | StageWork | PictureWork
M = TypeVar("M", bound=Message)
# Work for the next host, or a result for the router; an event without an outcome after a `Prefill`.
Outcome = stage_pb2.Hop | stage_pb2.Event


def seconds_until(due_at: float) -> float:
    """Seconds until `due_at`, by the monotonic clock; 0 once it is over."""
    return max(due_at - time.monotonic(), 0.0)


def work_of(hop: stage_pb2.Hop) -> AnyWork:
    """The work that a hop carries. It must carry some."""
    kind = hop.WhichOneof("work")
    assert kind is not None
    work: AnyWork = getattr(hop, kind)
    return work


def put_work(hop: stage_pb2.Hop, work: AnyWork) -> None:
    """Have `hop` carry a copy of `work`."""
    name = type(work).__name__.lower()
    getattr(hop, name).CopyFrom(work)


def copy_of(message: M) -> M:
    """A copy to change: a host changes a hop in place on its way through."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def draft_of(work: AnyWork) -> int:
    """Number of the new symbols that are draft tokens."""
    return work.draft if isinstance(work, stage_pb2.Verify) else 0


def known_of(work: Step, alphabet: Alphabet) -> int:
    """Number of the new symbols that are no draft tokens."""
    return alphabet.count(work.clean) - draft_of(work)


def follows_schema(work: AnyWork | None) -> bool:
    """True for a step whose text is held to a JSON schema."""
    return isinstance(work, Step) and work.sampling.HasField("grammar")


def drafts_itself(work: AnyWork) -> TypeGuard[stage_pb2.Verify]:
    """True for a Verify after which the last host drafts."""
    return isinstance(work, stage_pb2.Verify) and work.HasField("drafting")


def goes_on(work: AnyWork) -> bool:
    """True for a step after which the hosts go on by themselves."""
    return drafts_itself(work) or (isinstance(work, stage_pb2.Decode) and work.remaining > 1)


def hidden_rows(work: StageWork, alphabet: Alphabet) -> int:
    """Rows of hidden states that travel with `work`; nothing is asked after the last symbol of a candidate."""
    inner = sum(alphabet.count(each) - 1 for each in work.candidates) if isinstance(work, stage_pb2.Score) else 0
    return alphabet.count(work.clean) + inner


def step_hops(hop: stage_pb2.Hop, alphabet: Alphabet, most: int, rows: int) -> list[stage_pb2.Hop]:
    """`hop` as it travels: Prefills with the beginning of its symbols, then the rest, its candidates in batches.

    :param alphabet: of the symbols that it brings.
    :param most: hops of known symbols.
    :param rows: symbols of the candidates of a batch, about; a batch has one candidate at least.
    """
    *first, last = prefill_hops(hop, alphabet, most)
    hops = [*first, *_batches(last, alphabet, rows)]
    for later in hops[1:]:
        later.ClearField("memory")  # the session is open by then
    return hops


def _batches(hop: stage_pb2.Hop, alphabet: Alphabet, rows: int) -> list[stage_pb2.Hop]:
    """A Score as one hop for each batch of its candidates; any other hop alone."""
    if not isinstance(score := work_of(hop), stage_pb2.Score):
        return [hop]
    candidates = list(score.candidates)
    size = candidates_together(alphabet.count(candidates[0]), len(candidates), rows)
    if size >= len(candidates):
        return [hop]
    first = copy_of(hop)
    del first.score.candidates[:]
    first.score.batches = -(-len(candidates) // size)
    later = copy_of(first)
    # The later ones start after the last known symbol, and the last host remembers what it said of it: read again it
    # would be a pass of one row through every stage for each batch, and its cache differ in the last bits.
    later.score.start += alphabet.count(score.clean)
    later.score.ClearField("clean")
    later.score.ClearField("reads")
    hops = []
    for batch in range(first.score.batches):
        hops.append(copy_of(later if batch else first))
        hops[-1].score.batch = batch
        hops[-1].score.candidates.extend(candidates[batch * size : (batch + 1) * size])
    return hops


def has_more(work: AnyWork) -> bool:
    """True for a hop after which others of the same step follow."""
    return isinstance(work, stage_pb2.Prefill) or (isinstance(work, stage_pb2.Score) and work.batch + 1 < work.batches)


def results_of(hops: Iterable[stage_pb2.Hop]) -> int:
    """Number of results that come back of the hops of one step."""
    return sum(not hop.HasField("prefill") for hop in hops)


def merged(events: Sequence[stage_pb2.Event]) -> stage_pb2.Event:
    """The result of a step: its one event, or the scores of its batches, in order. Raises StatusError for others."""
    if len(events) == 1:
        return events[0]
    whole = stage_pb2.Event(session=events[0].session, number=events[0].number)
    for batch, event in enumerate(events):
        if event.WhichOneof("outcome") != "scores" or event.scores.batch != batch:
            raise internal(f"what came for batch {batch} of a step's candidates is not its scores")
    whole.scores.nats = b"".join(event.scores.nats for event in events)
    whole.timings.extend(summed(timing for event in events for timing in event.timings))
    return whole


def summed(timings: Iterable[stage_pb2.HopTiming]) -> list[stage_pb2.HopTiming]:
    """Timings of several hops of one step, added up host by host."""
    totals = dict[str, stage_pb2.HopTiming]()
    for timing in timings:
        total = totals.setdefault(timing.host, stage_pb2.HopTiming(host=timing.host))
        total.queue_ms += timing.queue_ms
        total.compute_ms += timing.compute_ms
        total.received_bytes += timing.received_bytes
    return list(totals.values())


def after_prefix(work: Step, positions: int, alphabet: Alphabet) -> Step:
    """`work`, which opens a session at 0, for hosts that keep its first `positions` symbols."""
    rest = copy_of(work)
    rest.start, rest.clean = positions, alphabet.cut(work.clean, positions)
    return rest


def prefill_hops(hop: stage_pb2.Hop, alphabet: Alphabet, most: int = MAX_PREFILL_CHUNKS) -> list[stage_pb2.Hop]:
    """`hop` as it travels: alone, or after Prefills with the beginning of its symbols.

    :param alphabet: of the symbols that it brings.
    :param most: hops in all.
    """
    work = work_of(hop)
    if not isinstance(work, Step):
        return [hop]
    count, draft = alphabet.count(work.clean), draft_of(work)
    tree = draft if isinstance(work, stage_pb2.Verify) and work.HasField("tree") else 0
    lengths = read_lengths(count, work.reads if isinstance(work, stage_pb2.Score) else (), tree)
    chunks = prefill_chunks(lengths, count - draft, -(-count // most))
    hops, at = list[stage_pb2.Hop](), 0
    for chunk in chunks[:-1]:
        end = at + sum(chunk)
        before = copy_of(hop)
        before.prefill.CopyFrom(
            stage_pb2.Prefill(
                number=work.number,
                start=work.start + at,
                clean=alphabet.cut(work.clean, at, end),
                reads=chunk if isinstance(work, stage_pb2.Score) else (),
                codec=work.codec,
                prompt=work.start + count if isinstance(work, stage_pb2.Score) else work.prompt,
                for_drafting=drafts_itself(work),
            )
        )
        hops.append(before)
        at = end
    if not hops:
        return [hop]
    last = copy_of(hop)
    rest = work_of(last)
    assert isinstance(rest, Step)
    rest.start, rest.clean = work.start + at, alphabet.cut(work.clean, at)
    if isinstance(rest, stage_pb2.Score):
        rest.reads[:] = chunks[-1]
    return [*hops, last]


def hand_on(hop: stage_pb2.Hop) -> None:
    """Address a hop to the host after the one that worked on it, or to that of the expert whose turn it is."""
    if hop.HasField("consult"):
        hop.place = hop.consult.places[hop.consult.expert]
    elif hop.path:
        hop.place = (hop.place + 1) % len(hop.path)


def next_decode(hop: stage_pb2.Hop, text: bytes, alphabet: Alphabet) -> stage_pb2.Hop:
    """Turn the Decode of `hop`, which gave `text`, into the next one: it reads `text`. Returns `hop`."""
    decode = hop.decode
    decode.number += 1
    decode.start += alphabet.count(decode.clean)
    decode.clean = text
    decode.remaining -= 1
    decode.stage = 0
    decode.ClearField("hidden")
    hop.ClearField("memory")
    del hop.timings[:]
    return hop


def next_verify(hop: stage_pb2.Hop, text: bytes, kept: int, draft: Draft, alphabet: Alphabet) -> stage_pb2.Hop:
    """The hop of the Verify after that of `hop`, which gave `text`: it reads what of it the hosts do not remember, and
    `draft`.

    :param kept: draft tokens of `hop` that they remember.
    """
    after = copy_of(hop)
    verify = after.verify
    verify.number += 1
    verify.start += alphabet.count(verify.clean) - verify.draft + kept
    verify.clean = alphabet.cut(text, kept) + alphabet.encode(draft.symbols)
    verify.drafting.remaining -= alphabet.count(text)
    verify.draft, verify.stage = len(draft.symbols), 0
    verify.ClearField("hidden")
    verify.ClearField("tree")
    if draft.is_tree:
        verify.tree.depths.extend(draft.depths)
    after.ClearField("memory")
    del after.timings[:]
    return after


def next_denoise(hop: stage_pb2.Hop, estimate: bytes, before: bytes) -> stage_pb2.Hop:
    """Turn the Denoise of `hop`, whose step is made, into that of the next level. Returns `hop`.

    estimate, before: as the message has them.
    """
    denoise = hop.denoise
    denoise.number += 1
    denoise.level += 1
    denoise.stage = 0
    denoise.estimate, denoise.before = estimate, before
    denoise.ClearField("hidden")
    return hop
