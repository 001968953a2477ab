"""A long step in pieces: where it is cut, and what a host does with them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.cli.ports import free_port_block
from stages.host.host import Host
from stages.host.parts import Parts
from stages.model.prefill import MAX_PREFILL_CHUNKS, READ_POSITIONS, max_new_tokens, read_lengths
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import new_server
from stages.wire.messages import prefill_hops, work_of
from tests.conftest import refused, started, until
from tests.stages.hops import LONG_PROMPT, opening
from tests.stages.hosts import event_of, open_host, send
from tests.stages.raw_client import ROUTER, Peer, peer
from tests.stages.scripted_server import Answering, take

TOKENS = Vocabulary(300)


def lengths(read: stage_pb2.Read) -> list[int]:
    """Lengths of the reads in which a host reads it."""
    return read_lengths(TOKENS.count(read.clean), read.reads)


# Chunk boundaries
@given(st.data())
def test_chunks_are_read_like_the_whole_prompt(data: st.DataObject) -> None:
    known, draft = data.draw(st.integers(1, 6000)), data.draw(st.sampled_from([0, 0, 1, 60]))
    reads = data.draw(st.lists(st.integers(1, 300), max_size=30))
    while sum(reads) > known:
        reads.pop()
    count, start = known + draft, data.draw(st.sampled_from([0, 7]))
    candidates = [b"abcd"] if not draft and data.draw(st.booleans()) else []
    clean = TOKENS.encode([i % 300 for i in range(count)])
    more = {"candidates": candidates, "reads": reads} if candidates else {"prompt": data.draw(st.integers(0, known))}
    whole = opening(clean=clean, start=start, draft=draft, **more)
    hops = prefill_hops(whole, TOKENS)
    works = [hop.read for hop in hops]
    assert len(works) <= MAX_PREFILL_CHUNKS
    assert b"".join(work.clean for work in works) == clean
    counts = [TOKENS.count(work.clean) for work in works]
    assert [work.start for work in works] == [start + sum(counts[:i]) for i in range(len(works))]
    assert [read for work in works for read in lengths(work)] == lengths(whole.read)
    assert max(counts) <= max_new_tokens(count)
    assert counts[-1] > draft, "drafts come after a known token"
    for work in works[:-1]:
        assert work.WhichOneof("ask") is None
        assert work.prompt == (start + count if candidates else more["prompt"])
    assert works[-1].sample == whole.read.sample
    assert works[-1].score == whole.read.score


def test_a_long_prompt_travels_in_few_large_chunks() -> None:
    short = opening(clean=LONG_PROMPT[:128])
    assert prefill_hops(short, Vocabulary(256)) == [short]
    hops = prefill_hops(opening(clean=bytes(8000)), Vocabulary(256))
    assert [len(work_of(hop).clean) for hop in hops] == [512] * 15 + [320]


@given(known=st.integers(1, 300), tree=st.integers(0, 64))
def test_a_tree_is_one_read(known: int, tree: int) -> None:
    lengths = read_lengths(known + tree, tree=tree)
    assert sum(lengths) == known + tree
    assert max(lengths) <= READ_POSITIONS
    assert lengths[-1] >= tree


# Chunks on a host
def pieces(parts: Parts, session: str = "s", **fields: Any) -> list[stage_pb2.Hop]:
    return prefill_hops(opening(parts.plan.models["ar"].digest, session, **fields), Vocabulary(256))


@pytest.mark.parametrize(
    "fields",
    [
        {"remaining": 3},
        {"draft": 20},
        {"candidates": [b"abcde", b"fghij"]},
        {"reads": [150, 20, 60, 60], "candidates": [b"abcde"]},
    ],
    ids=["text", "drafts", "scores", "a replay"],
)
async def test_chunks_give_the_text_of_one_hop(whole: Parts, fields: dict[str, Any]) -> None:
    async def write(host: Host, *hops: stage_pb2.Hop) -> list[stage_pb2.Event]:
        send(host, *hops)
        events = [await event_of(host) for _ in range(fields.get("remaining", 1))]
        assert host.subscribers.queues[ROUTER].empty()
        return events

    async with open_host(whole) as host:
        cut = pieces(whole, "cut", **fields)
        assert len(cut) >= 3
        one = await write(host, opening(cut[0].digest, "one", **fields))
        several = await write(host, *cut)
        assert [(e.number, e.text, e.scores.nats) for e in one] == [(e.number, e.text, e.scores.nats) for e in several]
        assert one[0].text or one[0].scores.nats
        caches = [host.sessions.sessions[name].caches for name in ("one", "cut")]
        for part in range(3):
            for mine, other in zip(caches[0][part], caches[1][part], strict=True):
                assert mine.length == other.length
                assert mine.keys.equal(other.keys)
                assert mine.values.equal(other.values)
        (passage,) = several[0].timings
        received = sum(hop.ByteSize() for hop in cut)
        assert (passage.host, passage.received_bytes) == ("h", received)
        assert passage.compute_ms > 0


async def test_a_repeated_or_early_chunk_is_refused(whole: Parts) -> None:
    async with open_host(whole) as host:
        first, second, third, last = pieces(whole)
        host.accept(first, 1)
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "has read 128 positions, but the sweep continues at 256"):
            host.accept(third, 1)
        host.accept(second, 1)
        with refused(grpc.StatusCode.ALREADY_EXISTS, "the piece of sweep 0 of session 's' at 128 was already accepted"):
            host.accept(second, 1)
        host.accept(third, 1)
        host.accept(last, 1)
        host._go()
        assert (await event_of(host)).text


async def test_too_many_chunks_are_refused(whole: Parts) -> None:
    async with open_host(whole) as host:
        first, second, *_ = pieces(whole)
        host.accept(first, 1)
        for at in range(128, 128 + MAX_PREFILL_CHUNKS - 2):
            work_of(second).start, work_of(second).clean = at, b"x"
            host.accept(second, 1)
        work_of(second).start += 1
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "a step can have at most 16 pieces"):
            host.accept(second, 1)


# Along the chain
@pytest.fixture
def chain(bundles: Path, servers: Any) -> Iterator[tuple[Peer, Answering]]:
    """A host of the first stage, and what comes to the one after it."""
    port = free_port_block(2)
    address, after = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    second = Answering(take)

    async def serve(stop: asyncio.Event) -> None:
        server = new_server()
        stage_pb2_grpc.add_StageServiceServicer_to_server(second, server)
        server.add_insecure_port(after)
        async with started(server):
            await stop.wait()

    servers.run(serve)
    servers.stage(bundles / "own", (0,), address, after)
    with peer(address) as first:
        until(lambda: first.describe().releases and not first.describe().releases[0].loading)
        yield first, second


def test_a_chunk_is_forwarded_before_the_next_one_arrives(chain, whole: Parts) -> None:
    first, second = chain
    first.subscribe()

    def handed_on(session: str, count: int) -> list[stage_pb2.Read]:
        came = [hop.read for batch in second.batches for hop in batch.hops if hop.session == session]
        return came if len(came) == count else []

    cut = pieces(whole, "cut")
    for number, hop in enumerate(cut, start=1):
        first.push(hop)
        until(lambda number=number: handed_on("cut", number))  # and the host got no other chunk
    steps = handed_on("cut", len(cut))
    assert [(type(work), work.stage, work.start) for work in steps] == [
        (type(work_of(hop)), 1, work_of(hop).start) for hop in cut
    ]
    first.push(opening(cut[0].digest, "one"))
    (alone,) = until(lambda: handed_on("one", 1))
    assert b"".join(step.hidden for step in steps) == alone.hidden
