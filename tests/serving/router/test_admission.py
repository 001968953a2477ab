"""Quotas and places: who continues, who waits, and who is sent away."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import grpc
import pytest

from serving.router.admission import DAY_S, Admission
from serving.router.settings import AdmissionSettings
from stages import clock
from stages.wire.status import StatusError
from stages.wire.tokens import ANYBODY, Key

PATIENT_S = 30.0
ALICE, BOB, CAROL = Key("alice"), Key("bob"), Key("carol")


def admission(limit: int, queue: int = 0, wait_s: float = PATIENT_S, reserves: bool = False) -> Admission:
    return Admission(AdmissionSettings(limit, 1000, queue, wait_s), reserves)


async def refused(gate: Admission, key: Key, max_bytes: int = 1) -> StatusError:
    with pytest.raises(StatusError) as caught:
        async with gate.enter(key, max_bytes):
            pass
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_ms
    return caught.value


async def enters(gate: Admission, key: Key, max_bytes: int = 1) -> None:
    async with gate.enter(key, max_bytes) as admitted:
        admitted.spent_bytes += max_bytes


class Held:
    """A request in a task of its own, which continues until it is told to end."""

    def __init__(self, gate: Admission, key: Key, batch: bool = False) -> None:
        self.key, self.batch, self.inside, self.end = key, batch, asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._go(gate))

    async def _go(self, gate: Admission) -> None:
        async with gate.enter(self.key, 1, batch=self.batch):
            self.inside.set()
            await self.end.wait()

    async def finish(self) -> None:
        self.end.set()
        await self.task


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


# Places


async def test_over_the_limit_is_refused() -> None:
    gate = admission(2)
    async with gate.enter(ANYBODY, 1), gate.enter(ANYBODY, 1):
        assert gate.requests == 2
        assert "2 requests are under way, the limit" in str(await refused(gate, ANYBODY))
    await enters(gate, ANYBODY)
    assert gate.requests == 0


async def test_requests_start_at_the_routers_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of three a second starts when a second is over, and waits in its place until then."""
    throttled = SimpleNamespace(now=100.0)
    monkeypatch.setattr("asyncio_throttle.throttler.time", SimpleNamespace(monotonic=lambda: throttled.now))
    gate = Admission(AdmissionSettings(8, 3, 0, PATIENT_S))
    held = [Held(gate, ANYBODY) for _ in range(4)]
    await asyncio.sleep(0.05)  # it asks every hundredth of a second
    assert [each.inside.is_set() for each in held] == [True, True, True, False]
    assert gate.requests == 4
    throttled.now += 1.01
    await held[3].inside.wait()
    for each in held:
        await each.finish()
    assert gate.requests == 0


async def test_some_wait_for_a_place() -> None:
    gate = admission(1, queue=2)
    first, second, third = (Held(gate, ANYBODY) for _ in range(3))
    await settle()
    assert (first.inside.is_set(), second.inside.is_set(), gate.waiting) == (True, False, 2)
    assert "and 2 more wait" in str(await refused(gate, ANYBODY))
    for running, following in ((first, second), (second, third)):
        await running.finish()
        await following.inside.wait()
    await third.finish()
    assert (gate.requests, gate.waiting) == (0, 0)


async def test_who_would_wait_too_long_is_refused_at_once() -> None:
    now = [1000.0]
    gate = admission(1, queue=8, wait_s=0.02)
    with clock.replaced(lambda: now[0]):
        async with gate.enter(ANYBODY, 1):
            now[0] += 0.05  # so long do requests take
    first = Held(gate, ANYBODY)
    await settle()
    refusal = await refused(gate, ANYBODY)
    assert "waited" not in str(refusal)
    await first.finish()


async def test_who_leaves_while_waiting_leaves_nothing_behind() -> None:
    gate = admission(1, queue=2)
    first, second, third = (Held(gate, ANYBODY) for _ in range(3))
    await settle()
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    assert gate.waiting == 1
    first.end.set()
    await asyncio.sleep(0)  # the place is given to the third, which goes in the same moment
    third.task.cancel()
    await asyncio.gather(first.task, third.task, return_exceptions=True)
    assert (gate.requests, gate.waiting) == (0, 0)
    await enters(gate, ANYBODY)


# Shares


async def test_a_flood_does_not_starve_others() -> None:
    """One key asks without end: places that come free go to those who hold the fewest."""
    gate, served = admission(4, queue=8, reserves=True), Counter[str]()

    async def ask(key: Key) -> None:
        async with gate.enter(key, 1):
            served[key.name] += 1
            await asyncio.sleep(0.002)

    flood = [asyncio.create_task(ask(ALICE)) for _ in range(400)]
    await settle()
    for key in (BOB, CAROL):
        for _ in range(10):
            await ask(key)
    await asyncio.gather(*flood, return_exceptions=True)
    assert (served["bob"], served["carol"]) == (10, 10), "not one of theirs was refused"
    assert 0 < served["alice"] < 400


async def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    gate = admission(1, queue=2, reserves=True)
    first = Held(gate, ALICE)
    waiting = [Held(gate, ALICE) for _ in range(2)]
    await settle()
    bob = Held(gate, BOB)
    await settle()
    assert gate.waiting == 2
    assert waiting[1].task.done(), "the newest of the longest made room"
    assert isinstance(waiting[1].task.exception(), StatusError)
    await first.finish()
    await bob.inside.wait()
    assert not waiting[0].inside.is_set(), "fewest places first"
    await bob.finish()
    await waiting[0].inside.wait()
    await waiting[0].finish()


# Quotas


async def test_a_rate_refuses_at_once() -> None:
    gate, key = admission(8), Key("alice", rate=3)
    with clock.replaced(lambda: 1000.0):
        for _ in range(3):
            await enters(gate, key)
        refusal = await refused(gate, key)
    assert "key alice may start 3 requests a second" in str(refusal)
    assert 333 <= (refusal.retry_after_ms or 0) <= 334
    await enters(gate, BOB)


async def test_requests_at_once() -> None:
    gate, key = admission(8, queue=4), Key("alice", concurrent=2)
    async with gate.enter(key, 1), gate.enter(key, 1):
        assert "key alice has 2 requests under way, its limit" in str(await refused(gate, key))
        await enters(gate, BOB)
    await enters(gate, key)


async def test_bytes_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [DAY_S * 20_000 + 10.0]
    monkeypatch.setattr("serving.router.admission.time.time", lambda: now[0])
    gate, key = admission(8), Key("alice", bytes_per_day=100)
    async with gate.enter(key, 80) as admitted:
        assert "20 are left until midnight UTC, and 21 were asked for" in str(await refused(gate, key, 21))
        admitted.spent_bytes += 30
    await enters(gate, key, 70)
    refusal = await refused(gate, key, 1)
    assert "key alice may use 100 bytes a day, prompts included: 0 are left" in str(refusal)
    assert refusal.retry_after_ms == (DAY_S - 10) * 1000
    now[0] += DAY_S
    async with gate.enter(key, 100) as admitted:
        now[0] += DAY_S
        await enters(gate, key, 100)
        admitted.spent_bytes += 1
    assert "0 are left" in str(await refused(gate, key, 1))


# Priorities


async def test_batch_requests_leave_places_and_the_queue_to_interactive_ones() -> None:
    gate = admission(8, queue=2)
    batch = [Held(gate, ANYBODY, batch=True) for _ in range(8)]
    await settle()
    assert [each.inside.is_set() for each in batch] == [True] * 6 + [False] * 2, "a quarter is not theirs"
    gate._mean_s = 4 * PATIENT_S  # as the third in line it would wait too long
    usual = [Held(gate, ANYBODY) for _ in range(3)]
    await settle()
    assert [each.inside.is_set() for each in usual] == [True, True, False]
    with pytest.raises(StatusError, match="and 2 more wait"):
        await batch[-1].task  # it made room in the queue
    await batch[0].finish()
    await settle()
    assert usual[2].inside.is_set(), "and the next place goes to an interactive one"
    assert not batch[6].inside.is_set()
    for each in (*batch[1:6], *usual):
        await each.finish()
    await batch[6].finish()
    assert (gate.requests, gate.batches, gate.waiting) == (0, 0, 0)


async def test_interactive_requests_leave_an_eighth_to_batch_ones() -> None:
    gate = admission(8, queue=16)
    usual = [Held(gate, ANYBODY) for _ in range(12)]
    batch = [Held(gate, ANYBODY, batch=True) for _ in range(2)]
    await settle()
    for each in usual[:2]:
        await each.finish()
        await settle()
    assert [each.inside.is_set() for each in batch] == [True, False]
    assert [each.inside.is_set() for each in usual] == [True] * 9 + [False] * 3
    for each in (*usual[2:], *batch):
        await each.finish()
