"""A host without a network: what it does with hops that it has accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from stages import subscribers
from stages.errors import InputError
from stages.host import Host, HostSettings
from stages.parts import HostPlan, Parts, load_parts, plan_host
from stages.refusal import Refusal
from stages.subscribers import Subscribers
from stages.v1 import stage_pb2

ROUTER = "r"


@pytest.fixture(scope="module")
def plan(bundles: Path) -> HostPlan:
    return plan_host(bundles / "own", (0, 1, 2))


@pytest.fixture(scope="module")
def parts(plan: HostPlan) -> Parts:
    return load_parts(plan)


@pytest.fixture
def drive(plan: HostPlan, parts: Parts) -> Callable[..., Any]:
    """Run a story with a host whose worker runs, or not yet."""

    def run(story: Callable[[Host], Awaitable[Any]], working: bool = True, **settings: Any) -> Any:
        async def main() -> Any:
            host = Host(plan, HostSettings("h", **settings), None)
            host.parts = parts
            events = host.subscribers.listen(ROUTER)
            await anext(events)
            worker = asyncio.create_task(host.work()) if working else None
            try:
                return await asyncio.wait_for(story(host), 20)
            finally:
                if worker is not None:
                    worker.cancel()
                await host.close()

        return asyncio.run(main())

    return run


def hop(host: Host, session: str = "s", **changes: Any) -> stage_pb2.PushRequest:
    assert host.plan.chain is not None
    request = stage_pb2.PushRequest(router=ROUTER, session=session, capacity=30, digest=host.plan.chain.digest)
    request.deadline_unix_ms = int(time.time() * 1000) + 30_000
    request.sweep.CopyFrom(stage_pb2.Sweep(clean=b"Once ", slots=8, steps=1, codec="fp32", **changes))
    return request


async def event_of(host: Host) -> stage_pb2.Event:
    return await host.subscribers.queues[ROUTER].get()


def test_a_full_queue_sends_work_away(drive: Callable[..., Any]) -> None:
    async def story(host: Host) -> Refusal:
        host.accept(hop(host, "a"), 10)
        host.accept(hop(host, "b"), 10)
        with pytest.raises(Refusal, match="h has 2 hops waiting") as caught:
            host.accept(hop(host, "c"), 10)
        counters = host.counters_now()
        assert (counters.queued, counters.queue_limit, counters.refused, counters.sessions) == (2, 2, 1, 2)
        return caught.value

    refusal = drive(story, working=False, queue_limit=2)
    assert (refusal.code, refusal.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 500)


def test_work_that_became_late_is_dropped_and_told(drive: Callable[..., Any]) -> None:
    async def story(host: Host) -> None:
        request = hop(host)
        request.deadline_unix_ms = int(time.time() * 1000) + 30
        host.accept(request, 10)
        await asyncio.sleep(0.05)
        worker = asyncio.create_task(host.work())
        event = await event_of(host)
        assert event.fault.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert "the deadline passed while the work was waiting" in event.fault.message
        assert event.fault.host == "h"
        assert (host.sessions.sessions, host.counters.faults, host.counters.completed) == ({}, 1, 0)
        worker.cancel()

    drive(story, working=False)


def test_a_hop_that_fails_harms_no_other(drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(host: Host) -> None:
        whole = host._compute
        monkeypatch.setattr(host, "_compute", lambda job: 1 / 0)
        host.accept(hop(host, "a"), 10)
        fault = (await event_of(host)).fault
        assert fault.code == grpc.StatusCode.INTERNAL.value[0]
        assert "the host's log says why" in fault.message
        monkeypatch.setattr(host, "_compute", whole)
        host.accept(hop(host, "b"), 10)
        assert len((await event_of(host)).text) == 8

    drive(story)


def test_nothing_follows_from_a_released_session(drive: Callable[..., Any]) -> None:
    async def story(host: Host) -> None:
        host.accept(hop(host, "waiting"), 10)
        assert host.release(["waiting", "unknown"]) == 1
        host.accept(hop(host, "wanted"), 10)
        worker = asyncio.create_task(host.work())
        assert (await event_of(host)).session == "wanted"
        assert (host.counters.completed, host.subscribers.queues[ROUTER].qsize()) == (1, 0)
        worker.cancel()

    drive(story, working=False)


def test_a_session_released_while_it_is_computed(drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(host: Host) -> None:
        whole, loop = host._compute, asyncio.get_running_loop()

        def released_meanwhile(job: Any) -> Any:
            asyncio.run_coroutine_threadsafe(release(host), loop).result(5)
            return whole(job)

        async def release(host: Host) -> None:
            host.release(["s"])

        monkeypatch.setattr(host, "_compute", released_meanwhile)
        host.accept(hop(host), 10)
        while not host.counters.completed:
            await asyncio.sleep(0.01)
        assert host.subscribers.queues[ROUTER].empty()

    drive(story)


def test_a_stopping_host_ends_what_it_has_and_opens_nothing(drive: Callable[..., Any]) -> None:
    async def story(host: Host) -> None:
        host.accept(hop(host), 10)
        await event_of(host)
        host.stopping = True
        with pytest.raises(Refusal, match="h is stopping") as caught:
            host.accept(hop(host, "new"), 10)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        host.accept(hop(host, number=1, clean_start=5), 10)
        assert (await event_of(host)).number == 1

    drive(story)


def test_a_router_that_does_not_read_loses_events_and_harms_nobody() -> None:
    async def story() -> int:
        known = subscribers.Subscribers()
        listening = known.listen(ROUTER)
        await anext(listening)
        for number in range(subscribers.MAX_WAITING + 5):
            known.publish(ROUTER, stage_pb2.Event(session="s", number=number))
        known.publish("nobody", stage_pb2.Event())
        waiting = known.queues[ROUTER].qsize()
        await listening.aclose()
        assert ROUTER not in known
        return waiting

    assert asyncio.run(story()) == 4096


def test_a_second_subscription_takes_over() -> None:
    async def story() -> None:
        known = Subscribers()
        first, second = known.listen(ROUTER), known.listen(ROUTER)
        await anext(first)
        await anext(second)
        await first.aclose()
        assert ROUTER in known
        known.publish(ROUTER, stage_pb2.Event(session="s"))
        assert (await anext(second)).session == "s"

    asyncio.run(story())


@pytest.mark.parametrize("name", ["", "a b", "\udcff", "../x"])
def test_a_name_that_cannot_be_shown(name: str) -> None:
    with pytest.raises(InputError, match="host name"):
        HostSettings(name)
