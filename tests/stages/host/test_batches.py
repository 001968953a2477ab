"""Candidates of one step in batches: where they are cut, and what hosts do with them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.host.host import Host
from stages.host.parts import Parts
from stages.limits import MAX_CANDIDATES
from stages.model.scoring import candidates_together
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.hop_stream import Settled
from stages.wire.messages import merged, results_of, step_hops, work_of
from tests.conftest import refused
from tests.stages.hops import LONG_PROMPT, hidden_rows, opening, step
from tests.stages.hosts import event_of, open_host, send
from tests.stages.raw_client import ROUTER

ROWS = 40


def scoring(digest: str = "", session: str = "s", count: int = 11, length: int = 12, **fields: Any) -> stage_pb2.Hop:
    rng = np.random.default_rng(length)
    return opening(digest, session, **{"candidates": [rng.bytes(length) for _ in range(count)], **fields})


def cut(hop: stage_pb2.Hop, rows: int = ROWS) -> list[stage_pb2.Hop]:
    return step_hops(hop, BYTES, rows=rows)


# Batch boundaries
@given(
    count=st.integers(1, MAX_CANDIDATES),
    length=st.integers(1, 400),
    rows=st.integers(1, 4096),
    known=st.sampled_from([1, 128, 129, 700]),
    start=st.sampled_from([0, 9]),
    vocabulary=st.sampled_from([BYTES, Vocabulary(300)]),
)
def test_batches_hold_all_candidates_in_order(
    count: int, length: int, rows: int, known: int, start: int, vocabulary: Vocabulary
) -> None:
    clean = vocabulary.encode([i % 200 for i in range(known)])
    candidates = [vocabulary.encode([i % 200] * length) for i in range(count)]
    whole = scoring(clean=clean, start=start, candidates=candidates)
    hops = step_hops(whole, vocabulary, rows=rows)
    *before, first = [hop for hop in hops if not work_of(hop).start >= start + known]
    later = hops[len(before) + 1 :]
    assert b"".join(work_of(hop).clean for hop in hops) == clean
    assert all(hop.read.WhichOneof("ask") is None for hop in before)
    assert [each for hop in [first, *later] for each in hop.read.score.candidates] == candidates
    assert [hop.read.score.batch for hop in [first, *later]] == list(range(results_of(hops)))
    assert {hop.read.score.batches for hop in [first, *later]} == {len(later) + 1 if later else 0}
    sizes = [len(hop.read.score.candidates) for hop in [first, *later]]
    assert max(sizes) <= max(1, rows // length) or length == 1
    for hop in later:
        assert (hop.read.start, hop.read.clean, list(hop.read.reads)) == (start + known, b"", [])
        assert hidden_rows(hop.read, vocabulary) == len(hop.read.score.candidates) * (length - 1)
        assert (hop.read.score.temperature, hop.read.codec) == (whole.read.score.temperature, whole.read.codec)


def test_batches_are_even() -> None:
    assert candidates_together(256, 16, 1024) == 4
    assert candidates_together(100, 11, 1000) == 6, "not ten and one"
    assert candidates_together(1, 1024, 512) == 1024, "one token needs no reading"
    assert candidates_together(4000, 7, 1024) == 1


def test_few_candidates_travel_in_one_hop() -> None:
    few = scoring(count=2, clean=b"abc")
    assert cut(few) == [few]
    decode = stage_pb2.Hop(read=step(clean=b"ab"))
    assert cut(decode) == [decode]


def score(batch: int, *nats: float, ms: float = 1.0) -> stage_pb2.Event:
    timings = [stage_pb2.HopTiming(host=name, compute_ms=ms, received_bytes=10) for name in ("h", "i")]
    scores = stage_pb2.Scores(nats=np.array(nats, "<f8").tobytes(), batch=batch)
    return stage_pb2.Event(session="s", number=3, scores=scores, timings=timings)


def test_results_of_batches_are_joined() -> None:
    event = merged([score(0, -1.0, -2.0), score(1, -3.0, ms=2.0)])
    assert np.frombuffer(event.scores.nats, "<f8").tolist() == [-1, -2, -3]
    assert (event.session, event.number, event.scores.batch) == ("s", 3, 0)
    assert [(t.host, t.compute_ms, t.received_bytes) for t in event.timings] == [("h", 3, 20), ("i", 3, 20)]


# Batches on hosts
async def scores(host: Host, hops: Sequence[stage_pb2.Hop]) -> stage_pb2.Event:
    send(host, *hops)
    events = [await event_of(host) for _ in range(results_of(hops))]
    assert host.subscribers.queues[ROUTER].empty()
    return merged(events)


def near(one: stage_pb2.Event, other: stage_pb2.Event) -> bool:
    """Equal but for the last bits: they depend on the branches that attention takes together."""
    return np.allclose(*(np.frombuffer(event.scores.nats, "<f8") for event in (one, other)), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 12, ROWS, 60])
async def test_batches_give_the_scores_of_one_hop(whole: Parts, rows: int) -> None:
    digest = whole.plan.models["ar"].digest
    async with open_host(whole) as host:
        one = await scores(host, [scoring(digest, "one")])
        hops = cut(scoring(digest, "cut"), rows)
        several = await scores(host, hops)
        assert near(one, several)
        (passage,) = several.timings
        assert passage.received_bytes == sum(hop.ByteSize() for hop in hops), "those of prefills are in it"
        # the next step continues as after one hop
        follow = {"number": 1, "start": len(LONG_PROMPT), "clean": b"and so"}
        after = [
            await scores(host, hops)
            for hops in ([scoring(digest, "one", **follow)], cut(scoring(digest, "cut", **follow)))
        ]
        assert near(*after)


async def test_a_repeated_or_early_batch_is_refused(whole: Parts) -> None:
    digest = whole.plan.models["ar"].digest
    async with open_host(whole) as host:
        first, second, third, *_ = cut(scoring(digest, clean=b"The sea "))
        host.accept(first, 1)
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "batch 2 of step 0 of session 's' at 8 arrived, but batch 1"):
            host.accept(third, 1)
        host.accept(second, 1)
        with refused(grpc.StatusCode.ALREADY_EXISTS, "batch 1 of step 0 of session 's' was already accepted"):
            host.accept(second, 1)
        third.read.start = 3
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "batch 2 of step 0 of session 's' at 3 arrived, but"):
            host.accept(third, 1)


async def test_a_session_cannot_start_with_a_later_batch(whole: Parts) -> None:
    async with open_host(whole) as host:
        with refused(grpc.StatusCode.NOT_FOUND, "unknown session 's'"):
            host.accept(cut(scoring(whole.plan.models["ar"].digest))[-1], 1)


async def test_the_bytes_of_hops_under_way_are_bounded(whole: Parts) -> None:
    digest, size = whole.plan.models["ar"].digest, 1 << 19
    async with open_host(whole, queue_mb=1) as host:
        with host.scheduler._passing:  # nothing is computed meanwhile
            first, second, third, *_ = cut(scoring(digest, "a", clean=b"The sea "))
            host.accept(first, size)
            host.accept(second, size)
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "another message of 1 bytes: 1048576 of 1048576 are"):
                host.accept(third, 1)
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "try again later, with fewer candidates"):
                host.accept(scoring(digest, "b"), 1)
            assert list(host.sessions.sessions) == ["a"], "nothing was opened for it"
        host._go()
        assert [(await event_of(host)).scores.batch for _ in range(2)] == [0, 1]
        assert host.admission.queued_bytes == 0
        host.accept(third, 3 * size)  # a single one is as large as a message may be
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "1572864 of 1048576 are in flight"):
            host.accept(scoring(digest, "b"), 1)


async def test_results_waiting_for_the_next_host_or_the_router_are_bounded(
    whole: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_host(whole, working=False, queue_mb=1) as host:
        waiting = list[Settled]()
        relay = SimpleNamespace(address="there", send=lambda hop, settled: waiting.append(settled))
        large = opening(whole.plan.models["ar"].digest, hidden=bytes(1 << 20))
        large.path[:] = ["here", "there"]
        monkeypatch.setattr(host.next_hosts, "to", lambda address: relay)
        host._push(large, float("inf"))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "are in flight"):
            host.accept(opening(whole.plan.models["ar"].digest), 1)
        waiting[0](None)
        assert host.admission.queued_bytes == 0
        monkeypatch.setattr("stages.host.next_hosts.MAX_WAITING_BYTES", 1000)
        for _ in range(9):
            host.subscribers.publish(ROUTER, stage_pb2.Event(text=bytes(400)))
        assert host.subscribers.queues[ROUTER].qsize() == 3
