"""A host without a network: what it does with hops that it has accepted."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from stages.host import host as hosts
from stages.host import next_hosts as subscribers
from stages.host.host import Host
from stages.host.next_hosts import Subscribers
from stages.host.parts import Parts
from stages.v1 import stage_pb2
from stages.wire.messages import PROTOCOL
from tests.conftest import PATIENCE_S, eventually
from tests.stages.hosts import event_of, open_host, send
from tests.stages.raw_client import ROUTER, sweep
from tests.stages.slow_runner import watched


def hop(host: Host, session: str = "s", **changes: Any) -> stage_pb2.Hop:
    digest = host.releases.newest.plan.models["chain"].digest
    return sweep(digest, session, **{"clean": b"Once ", "slots": 8, "steps": 1, "codec": "fp32", **changes})


async def test_a_full_queue_refuses_hops(parts: Parts) -> None:
    async with open_host(parts, working=False, queue_limit=2) as host:
        host.accept(hop(host, "a"), 10)
        host.accept(hop(host, "b"), 10)
        (rejection,) = host.take(stage_pb2.HopBatch(protocol=PROTOCOL, hops=[hop(host, "c")])).rejections
        assert rejection.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert (rejection.message, rejection.retry_after_ms) == ("h has 2 hops in flight", 500)
        counters = host.counters_now()
        assert (counters.queued, counters.queue_limit, counters.refused, counters.sessions) == (2, 2, 1, 2)


async def test_hops_that_wait_for_others_start_with_them(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_host(parts, working=False) as host:
        begun, waits_s = list[int](), iter([PATIENCE_S, 2 * PATIENCE_S, 0.0, 0.0])
        monkeypatch.setattr(host.scheduler, "go", lambda: begun.append(len(host.scheduler)) or [])
        monkeypatch.setattr(hosts, "batching_wait_s", lambda *args: next(waits_s))
        for name in "abcd":
            host.take(stage_pb2.HopBatch(protocol=PROTOCOL, hops=[hop(host, name)]))
        assert begun == [3, 4]


async def test_a_hop_that_expires_while_waiting_fails_with_its_deadline(parts: Parts) -> None:
    async with open_host(parts, working=False) as host:
        request = hop(host)
        host.accept(request, 10).due_at = 0.0
        worker = asyncio.create_task(host.work())
        event = await event_of(host)
        assert event.fault.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert "the deadline passed while the work was waiting" in event.fault.message
        assert event.fault.host == "h"
        assert (host.sessions.sessions, host.counters.faults.total(), host.counters.completed) == ({}, 1, 0)
        worker.cancel()


async def test_a_host_without_a_link_to_the_next_one_names_that_one(parts: Parts) -> None:
    """It read a topology before its router, which goes round the host that has gone, and not round this one."""
    async with open_host(parts, working=False) as host:
        sent = hop(host)
        sent.MergeFrom(stage_pb2.Hop(path=["here", "gone"], place=1))
        host._push(sent, due_at=time.monotonic() + PATIENCE_S)
        fault = (await event_of(host)).fault
        assert (fault.host, fault.lost) == ("h", "gone")


async def test_a_clock_that_is_ahead_does_not_expire_requests(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines travel as the time that is left: this host's clock is an hour ahead of the router's."""
    now = time.time
    async with open_host(parts) as host:
        sent = hop(host)
        monkeypatch.setattr(time, "time", lambda: now() + 3600)
        assert not host.take(stage_pb2.HopBatch(protocol=PROTOCOL, hops=[sent])).rejections
        assert (await event_of(host)).text


async def test_a_failed_hop_does_not_affect_later_hops(parts: Parts) -> None:
    async with open_host(parts) as host:
        watched(parts, 1).fails = lambda method, pieces: method == "denoise"
        send(host, hop(host, "a"))
        fault = (await event_of(host)).fault
        assert fault.code == grpc.StatusCode.INTERNAL.value[0]
        assert "the host's log says why" in fault.message
        assert host.sessions.sessions == {}
        watched(parts, 1).fails = lambda method, pieces: False
        send(host, hop(host, "b"))
        assert len((await event_of(host)).text) == 8


@pytest.mark.parametrize(("block", "completed"), [(0, 0), (2, 1)], ids=["in the middle", "at the very end"])
async def test_a_session_is_released_while_it_is_computed(parts: Parts, block: int, completed: int) -> None:
    loop, part = asyncio.get_running_loop(), watched(parts, block)

    async def release(host: Host) -> None:
        host.sessions.release("s")

    def meddle(method: str, _: object) -> bool:
        """Frees the session from the engine's thread, on the event loop, before a block's last call."""
        if method == "denoise" and len(part.counts("denoise")) == 1 + (block == 2):
            asyncio.run_coroutine_threadsafe(release(host), loop).result(PATIENCE_S)
        return False

    part.fails = meddle
    async with open_host(parts) as host:
        send(host, hop(host))
        session = host.sessions.sessions["s"]
        await eventually(lambda: not session.pending)
        assert (host.subscribers.queues[ROUTER].empty(), host.counters.completed) == (True, completed)


async def test_a_later_hop_cannot_claim_more_than_its_session_holds(parts: Parts) -> None:
    """Its own message has 500 positions; the caches have 40."""

    async with open_host(parts) as host:
        send(host, hop(host))
        await event_of(host)
        beyond = hop(host, number=1, start=5, clean=b"x" * 36)
        beyond.capacity = 500
        (rejection,) = host.take(stage_pb2.HopBatch(protocol=PROTOCOL, hops=[beyond])).rejections
        assert rejection.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert rejection.message == "the session holds only 40 positions"
        send(host, hop(host, number=1, start=5, clean=b"x" * 35))


@pytest.mark.parametrize(
    ("protocol", "older"), [(0, "the sender"), (PROTOCOL - 1, "the sender"), (PROTOCOL + 1, "host h")]
)
async def test_another_protocol_is_refused_with_the_older_side_named(parts: Parts, protocol: int, older: str) -> None:
    async with open_host(parts) as host:
        (rejection,) = host.take(stage_pb2.HopBatch(protocol=protocol, hops=[hop(host)])).rejections
        assert rejection.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert rejection.message.endswith(f"upgrade onesweep on {older}")
        assert not host.sessions.sessions


async def test_a_stopping_host_completes_its_sessions_and_opens_none(parts: Parts) -> None:
    async with open_host(parts) as host:
        send(host, hop(host))
        await event_of(host)
        host.admission.stopping = True
        (rejection,) = host.take(stage_pb2.HopBatch(protocol=PROTOCOL, hops=[hop(host, "new")])).rejections
        assert (rejection.code, rejection.message) == (grpc.StatusCode.UNAVAILABLE.value[0], "h is stopping")
        send(host, hop(host, number=1, start=5))
        assert (await event_of(host)).number == 1


async def test_a_router_that_does_not_read_loses_its_events_only() -> None:
    known = Subscribers()
    listening = known.listen(ROUTER)
    await anext(listening)
    for number in range(subscribers.MAX_WAITING + 5):
        known.publish(ROUTER, stage_pb2.Event(session="s", number=number))
    known.publish("nobody", stage_pb2.Event())
    assert known.queues[ROUTER].qsize() == 4096
    await listening.aclose()
    assert ROUTER not in known.queues
