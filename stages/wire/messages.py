"""The work that hops carry: cutting a long prompt into several hops, and the hops that follow from one."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from onesweep.stages.model.prefill import MAX_PREFILL_CHUNKS, minimal_reads, prefill_chunks, read_lengths
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.status import StatusError, failed_precondition

PROTOCOL = 2  # of hops and their answers. Protocol 1 had one `Step` for all that a pipeline does.

# One step of a pipeline, which travels in one hop or, with `Prefill`s before it, in several.
Step = stage_pb2.Decode | stage_pb2.Verify | stage_pb2.Score
Work = stage_pb2.Sweep | Step
StageWork = stage_pb2.Prefill | Step
AnyWork = stage_pb2.Sweep | StageWork
M = TypeVar("M", bound=Message)
# Work for the next host, or a result for the router; an event without an outcome after a `Prefill`.
Outcome = stage_pb2.Hop | stage_pb2.Event


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


def hidden_rows(work: StageWork, alphabet: Alphabet) -> int:
    """Rows of hidden states that travel with `work`; nothing is asked after the last symbol of a candidate."""
    inner = sum(alphabet.count(each) - 1 for each in work.candidates) if isinstance(work, stage_pb2.Score) else 0
    return alphabet.count(work.clean) + inner


def prefill_hops(hop: stage_pb2.Hop, alphabet: Alphabet, most: int = MAX_PREFILL_CHUNKS) -> list[stage_pb2.Hop]:
    """`hop` as it travels: alone, or after Prefills with the beginning of its symbols.

    :param alphabet: of the symbols that it brings.
    :param most: hops in all.
    """
    work = work_of(hop)
    if isinstance(work, stage_pb2.Sweep | stage_pb2.Prefill):
        return [hop]
    count, draft = alphabet.count(work.clean), draft_of(work)
    is_tree = isinstance(work, stage_pb2.Verify) and work.HasField("tree")
    lengths = read_lengths(count, start=work.start, reads=work.reads, draft=draft, is_tree=is_tree)
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
                reads=minimal_reads(chunk),
                codec=work.codec,
                for_score=isinstance(work, stage_pb2.Score),
            )
        )
        hops.append(before)
        at = end
    if not hops:
        return [hop]
    last = copy_of(hop)
    rest = work_of(last)
    rest.start, rest.clean = work.start + at, alphabet.cut(work.clean, at)
    rest.reads[:] = minimal_reads(chunks[-1])
    return [*hops, last]


def hand_on(hop: stage_pb2.Hop) -> None:
    """Address a hop to the host after the one that worked on it."""
    if hop.path:
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
    decode.ClearField("reads")
    del hop.timings[:]
    return hop


def protocol_refusal(theirs: int, sender: str, receiver: str) -> StatusError:
    """The refusal where two processes speak different protocols: it names the one to upgrade."""
    older = sender if theirs < PROTOCOL else receiver
    return failed_precondition(
        f"{sender} speaks protocol {theirs or 1} of hops, {receiver} protocol {PROTOCOL}: upgrade onesweep on {older}"
    )
