"""The work that hops carry: splits a long step into several hops, merges their results, and makes the next step."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from stages.clock import monotonic
from stages.model.draft_tree import Draft
from stages.model.prefill import MAX_PREFILL_CHUNKS, prefill_chunks, read_lengths
from stages.model.scoring import candidates_together
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.channel import MAX_NAME
from stages.wire.status import internal, invalid, protocol_refusal

PROTOCOL = 9  # version of hops and their answers
hops_refusal = partial(protocol_refusal, ours=PROTOCOL, subject="hops")

Work = stage_pb2.Sweep | stage_pb2.Read  # on a text
PictureMessage = stage_pb2.Draw | stage_pb2.Denoise
AnyWork = Work | PictureMessage
M = TypeVar("M", bound=Message)
# Work for the next host, or a result for the router; an event without an outcome after a Read that asks nothing.
Outcome = stage_pb2.Hop | stage_pb2.Event


def seconds_until(due_at: float) -> float:
    """Seconds until `due_at`, by the monotonic clock; 0 once that is past."""
    return max(due_at - monotonic(), 0.0)


def work_of(hop: stage_pb2.Hop) -> AnyWork:
    """The work that a hop carries. The hop must carry some."""
    kind = hop.WhichOneof("work")
    assert kind is not None
    return getattr(hop, kind)


def put_work(hop: stage_pb2.Hop, work: AnyWork) -> None:
    """Put a copy of `work` into `hop`."""
    getattr(hop, type(work).__name__.lower()).CopyFrom(work)


def copy_of(message: M) -> M:
    """A copy that may be changed: hosts change a hop in place."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def step_hops(hop: stage_pb2.Hop, vocabulary: Vocabulary, rows: int) -> list[stage_pb2.Hop]:
    """Split `hop` as it is sent: Reads of the beginning of its tokens, then the rest, its candidates in batches.

    :param vocabulary: vocabulary of its tokens.
    :param rows: approximate tokens of the candidates in a batch; a batch has at least one candidate.
    """
    if not hop.HasField("read"):
        return [hop]
    *first, last = prefill_hops(hop, vocabulary)
    hops = [*first, *(_batches(last, vocabulary, rows) if last.read.HasField("score") else [last])]
    for later in hops[1:]:
        later.ClearField("memory")  # the session is already open
    return hops


def _batches(hop: stage_pb2.Hop, vocabulary: Vocabulary, rows: int) -> list[stage_pb2.Hop]:
    """Split a Score into one hop for each batch of its candidates."""
    candidates = list(hop.read.score.candidates)
    if not candidates:  # the last host writes them
        return [hop]
    size = candidates_together(vocabulary.count(candidates[0]), len(candidates), rows)
    if size >= len(candidates):
        return [hop]
    first = copy_of(hop)
    del first.read.score.candidates[:]
    first.read.score.batches = -(-len(candidates) // size)
    later = copy_of(first)
    # The later batches start after the last known token, and the last host keeps its hidden state: to read it again
    # would add a pass of one row through every stage for each batch, and its cache would differ in the last bits.
    later.read.start += vocabulary.count(later.read.clean)
    later.read.ClearField("clean")
    later.read.ClearField("reads")
    hops = []
    for batch in range(first.read.score.batches):
        hops.append(copy_of(later if batch else first))
        score = hops[-1].read.score
        score.batch = batch
        score.candidates.extend(candidates[batch * size : (batch + 1) * size])
    return hops


def results_of(hops: Iterable[stage_pb2.Hop]) -> int:
    """Number of results for the hops of one step."""
    return sum(not hop.HasField("read") or hop.read.WhichOneof("ask") is not None for hop in hops)


def merged(events: Sequence[stage_pb2.Event]) -> stage_pb2.Event:
    """The result of a step: its only event, or its batches' scores in order. Raises StatusError for other events."""
    if len(events) == 1:
        return events[0]
    whole = stage_pb2.Event(session=events[0].session, number=events[0].number)
    for batch, event in enumerate(events):
        if event.WhichOneof("outcome") != "scores" or event.scores.batch != batch:
            raise internal(f"the result for batch {batch} of a step's candidates is not its scores")
    whole.scores.nats = b"".join(event.scores.nats for event in events)
    whole.timings.extend(summed(timing for event in events for timing in event.timings))
    return whole


def summed(timings: Iterable[stage_pb2.HopTiming]) -> list[stage_pb2.HopTiming]:
    """Timings of several hops of one step, summed by host."""
    totals = dict[str, stage_pb2.HopTiming]()
    for timing in timings:
        total = totals.setdefault(timing.host, stage_pb2.HopTiming(host=timing.host))
        total.queue_ms += timing.queue_ms
        total.compute_ms += timing.compute_ms
        total.received_bytes += timing.received_bytes
    return list(totals.values())


def after_prefix(read: stage_pb2.Read, positions: int, vocabulary: Vocabulary) -> stage_pb2.Read:
    """`read`, which opens a session at 0, for hosts that keep its first `positions` tokens."""
    rest = copy_of(read)
    rest.start, rest.clean = positions, vocabulary.cut(read.clean, positions)
    return rest


def prefill_hops(hop: stage_pb2.Hop, vocabulary: Vocabulary) -> list[stage_pb2.Hop]:
    """Split the Read of `hop` as it is sent: alone, or after Reads of the beginning of its tokens, without a result.

    :param vocabulary: vocabulary of its tokens.
    """
    read = hop.read
    count, draft = vocabulary.count(read.clean), read.sample.draft
    lengths = read_lengths(count, read.reads, draft if read.sample.HasField("tree") else 0)
    if len(lengths) < 2:
        return [hop]
    chunks = prefill_chunks(lengths, count - draft, -(-count // MAX_PREFILL_CHUNKS))
    hops, at = list[stage_pb2.Hop](), 0
    for chunk in chunks:
        hops.append(copy_of(hop))
        part, end = hops[-1].read, at + sum(chunk)
        if chunk is not chunks[-1]:
            part.ClearField("ask")
            part.for_drafting = read.sample.HasField("drafting")
            part.clean = vocabulary.cut(read.clean, at, end)
            if read.HasField("score"):  # which reads all its tokens at once
                part.prompt = read.start + count
        else:
            part.clean = vocabulary.cut(read.clean, at)
        part.start += at
        part.reads[:] = chunk if read.HasField("score") else ()
        at = end
    return hops if len(hops) > 1 else [hop]


def forward(hop: stage_pb2.Hop) -> None:
    """Address a hop to the host after the one that computed it."""
    if hop.path:
        hop.place = (hop.place + 1) % len(hop.path)


def next_read(hop: stage_pb2.Hop, text: bytes, vocabulary: Vocabulary, kept: int, draft: Draft) -> stage_pb2.Hop:
    """The hop of the step after that of `hop`, whose result was `text`. It reads the part of `text` that the hosts do
    not hold, and `draft`.

    :param kept: accepted draft tokens of `hop`, which the hosts keep.
    """
    sample = hop.read.sample
    clean = vocabulary.cut(text, kept) + vocabulary.encode(draft.tokens)
    after = _next_step(hop, vocabulary.count(hop.read.clean) - sample.draft + kept, clean)
    sample = after.read.sample
    sample.remaining -= vocabulary.count(text)
    sample.draft = len(draft.tokens)
    sample.ClearField("tree")
    if draft.tokens and draft.first < len(draft.tokens):  # a tree
        sample.tree.depths.extend(draft.depths)
    return after


def next_score(hop: stage_pb2.Hop, text: bytes, vocabulary: Vocabulary, candidates: Sequence[bytes]) -> stage_pb2.Hop:
    """The hop of the step after that of `hop`, whose result was `text`: it reads `text`, and scores `candidates`."""
    after = _next_step(hop, vocabulary.count(hop.read.clean), text)
    score = after.read.score
    score.remaining -= vocabulary.count(text)
    score.candidates[:] = candidates
    return after


def _next_step(hop: stage_pb2.Hop, known: int, clean: bytes) -> stage_pb2.Hop:
    """The hop of the step after that of `hop`, from whose new tokens the hosts keep `known`: it brings `clean`."""
    after = copy_of(hop)
    read = after.read
    read.number += 1
    read.start += known
    read.clean, read.stage = clean, 0
    for name in ("hidden", "reads"):
        read.ClearField(name)
    after.ClearField("memory")
    del after.timings[:]
    return after


def next_denoise(hop: stage_pb2.Hop, estimate: bytes, before: bytes) -> stage_pb2.Hop:
    """Turn the finished Denoise of `hop` into the one at the next level. Returns `hop`.

    estimate, before: encoded, as in the message.
    """
    denoise = hop.denoise
    denoise.number += 1
    denoise.level += 1
    denoise.stage = 0
    denoise.estimate, denoise.before = estimate, before
    denoise.ClearField("hidden")
    return hop


# Names and counts that every message has.

MAX_TIMINGS = 64
MAX_TIMING_MS = 1e11
MAX_TIMING_BYTES = 1 << 40  # bounded, so that sums over all sweeps of a request fit their fields


def check_label(text: str, what: str, most: int = MAX_NAME) -> None:
    """Raise StatusError unless `text` can name a router or session."""
    if not 0 < len(text) <= most or not text.isascii() or not text.isprintable():
        raise invalid(f"{what} must be 1 to {most} printable ASCII characters")


def check_timings(timings: Sequence[stage_pb2.HopTiming]) -> None:
    """Raise StatusError unless `timings` can be summed."""
    if len(timings) > MAX_TIMINGS:
        raise invalid(f"{len(timings)} timings; a sweep can pass at most {MAX_TIMINGS} hosts")
    for timing in timings:
        check_label(timing.host, "a timing's host")
        if not (0 <= timing.queue_ms <= MAX_TIMING_MS and 0 <= timing.compute_ms <= MAX_TIMING_MS):
            raise invalid(f"the timing of {timing.host} has times that are negative, not finite or years long")
        if timing.received_bytes > MAX_TIMING_BYTES:
            raise invalid(f"the timing of {timing.host} has a message of {timing.received_bytes} bytes")
