"""Quotas and places: who continues, who waits, and who is sent away."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from serving.router.admission import DAY_S, Admission, PlaceRequest
from serving.router.service import RouterService
from serving.router.settings import AdmissionSettings
from stages.host.metrics import LinkTable
from stages.wire.channel import LOOPBACK_ONLY
from stages.wire.status import StatusError
from stages.wire.tokens import ANONYMOUS, Key, Keyring

PATIENT_S = 30.0
ALICE, BOB, CAROL = Key("alice"), Key("bob"), Key("carol")


class Gate:
    """An admission, and the time that it gets."""

    def __init__(self, limit: int, queue: int = 0, wait_s: float = PATIENT_S, reserves: bool = False) -> None:
        self.decides = Admission(AdmissionSettings(limit, 1000, queue, wait_s), reserves)
        self.now_s, self.unix_s = 1000.0, DAY_S * 20_000.5

    def ask(self, key: Key = ANONYMOUS, max_bytes: int = 1, batch: bool = False) -> PlaceRequest:
        self.decides.ask(request := PlaceRequest(key, max_bytes, batch=batch), self.now_s, self.unix_s)
        if request.state == "admitted":
            self.decides.begin(request, self.now_s)
        return request

    def refused(self, key: Key = ANONYMOUS, max_bytes: int = 1) -> StatusError:
        with pytest.raises(StatusError) as caught:
            self.ask(key, max_bytes)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_ms
        return caught.value

    def leave(self, *requests: PlaceRequest, spent_bytes: int = 0) -> None:
        for request in requests:
            request.spent_bytes += spent_bytes
            self.decides.leave(request, self.now_s)

    def enters(self, key: Key, max_bytes: int = 1) -> None:
        self.leave(self.ask(key, max_bytes), spent_bytes=max_bytes)

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.decides.requests, self.decides.batches, self.decides.waiting


def states(requests: list[PlaceRequest]) -> list[str]:
    return [each.state for each in requests]


# Places


def test_requests_over_the_limit_wait_in_the_queue_for_a_place() -> None:
    (gate := Gate(1)).ask()
    assert "1 requests are in flight, the limit" in str(gate.refused())
    gate = Gate(1, queue=2)
    first, second, third = (gate.ask() for _ in range(3))
    assert states([first, second, third]) == ["admitted", "waits", "waits"]
    assert "and 2 are waiting" in str(gate.refused())
    answered: list[str] = []
    second.answered = lambda: answered.append("second")
    gate.leave(first)
    assert states([second, third]) == ["admitted", "waits"]
    assert answered == ["second"]
    gate.leave(second, third)
    assert gate.counts == (0, 0, 0)


def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    gate = Gate(1, queue=8, wait_s=2.0)
    for took_s, expected_ms in ((10.0, 10_000), (20.0, 10_400), (1000.0, 60_000)):
        held = gate.ask()
        gate.now_s += took_s
        gate.leave(held)
        held, refusal = gate.ask(), gate.refused()
        assert "waited" not in str(refusal)
        assert refusal.retry_after_ms == pytest.approx(expected_ms, abs=1)
        gate.leave(held)  # at once


def test_a_wait_times_out_and_a_request_leaves_once() -> None:
    gate = Gate(1, queue=8, wait_s=0.02)
    held, waiting = gate.ask(), gate.ask()
    assert waiting.wait_s == 0.02
    with pytest.raises(StatusError, match=r"1 requests are in flight, the limit \(waited 0.02 s\)") as caught:
        gate.decides.begin(waiting, gate.now_s)
    assert caught.value.retry_after_ms == 1000
    gate.leave(waiting, held)
    with pytest.raises(KeyError, match="ended"):
        gate.leave(held)
    assert gate.counts == (0, 0, 0)


# Waiting


class Held:
    """A request in a task of its own, which continues until it is ended."""

    def __init__(self, service: RouterService) -> None:
        self.inside, self.end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._serve(service))

    async def _serve(self, service: RouterService) -> None:
        async with service._placed(PlaceRequest(ANONYMOUS, 1)):
            self.inside.set()
            await self.end.wait()

    async def finish(self) -> None:
        self.end.set()
        await self.task


def serving(limits: Admission) -> RouterService:
    rollout: Any = SimpleNamespace(ring=SimpleNamespace(security=LOOPBACK_ONLY, counters=LinkTable()))
    return RouterService(rollout, Keyring(), limits)


async def test_a_request_waits_until_admitted_or_timed_out() -> None:
    limits = Admission(AdmissionSettings(1, 1000, 3, 0.01))
    service = serving(limits)
    first, second = Held(service), Held(service)
    with pytest.raises(StatusError, match="waited"):
        await second.task
    limits.settings = AdmissionSettings(1, 1000, 3, PATIENT_S)
    third, fourth, fifth = (Held(service) for _ in range(3))
    await asyncio.sleep(0)
    third.task.cancel()
    await asyncio.gather(third.task, return_exceptions=True)
    first.end.set()
    await asyncio.sleep(0)  # the place is given to the fourth, which goes in the same moment
    fourth.task.cancel()
    await asyncio.gather(first.task, fourth.task, return_exceptions=True)
    await fifth.inside.wait()
    await fifth.finish()
    assert (limits.requests, limits.waiting) == (0, 0), "a request that leaves the queue leaves nothing behind"


async def test_requests_start_at_the_rate_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of three a second starts when a second is over, and waits in its place until then."""
    throttled = SimpleNamespace(now=100.0)
    monkeypatch.setattr("asyncio_throttle.throttler.time", SimpleNamespace(monotonic=lambda: throttled.now))
    limits = Admission(AdmissionSettings(8, 3, 0, PATIENT_S))
    service = serving(limits)
    held = [Held(service) for _ in range(4)]
    await asyncio.sleep(0.05)  # it asks every hundredth of a second
    assert [each.inside.is_set() for each in held] == [True, True, True, False]
    assert limits.requests == 4
    throttled.now += 1.01
    await held[3].inside.wait()
    for each in held:
        await each.finish()
    assert limits.requests == 0


# Shares


def test_a_flood_does_not_starve_others() -> None:
    """One key asks without end: places that come free go to those who hold the fewest."""
    gate = Gate(4, queue=8, reserves=True)

    def flood() -> None:
        with suppress(StatusError):
            while True:
                under_way.append(gate.ask(ALICE))

    under_way: list[PlaceRequest] = []
    flood()
    for key in (BOB, CAROL) * 10:
        asked = gate.ask(key)
        assert asked.state == "admitted", "a place is kept for a key that holds none"
        flood()
        gate.leave(asked, under_way.pop(0))
    assert {each.key.name for each in under_way} == {"alice"}


def test_a_full_queue_makes_room_for_a_key_with_fewer_requests() -> None:
    gate = Gate(1, queue=2, reserves=True)
    first, *waiting = (gate.ask(ALICE) for _ in range(3))
    bob = gate.ask(BOB)
    assert states([bob, *waiting]) == ["waits", "waits", "refused"], "the newest of the longest made room"
    with pytest.raises(StatusError, match="and 2 are waiting"):
        gate.decides.begin(waiting[1], gate.now_s)
    gate.leave(waiting[1], first)
    assert states([bob, waiting[0]]) == ["admitted", "waits"], "fewest places first"
    gate.leave(bob)
    assert waiting[0].state == "admitted"


# Quotas


def test_requests_over_the_rate_of_a_key_are_refused_at_once() -> None:
    gate, key = Gate(8), Key("alice", rate=3)
    for _ in range(3):
        gate.enters(key)
    refusal = gate.refused(key)
    assert "key alice may start 3 requests per second" in str(refusal)
    assert 333 <= (refusal.retry_after_ms or 0) <= 334
    gate.enters(BOB)
    gate.now_s += 0.34
    gate.enters(key)


def test_a_key_of_an_earlier_day_is_forgotten_unless_a_limit_still_counts_it() -> None:
    gate, held = Gate(8), Key("held")
    gate.ask(held)
    for key in (ALICE, BOB, slow := Key("slow", rate=1e-6)):
        gate.enters(key)
    gate.now_s, gate.unix_s = gate.now_s + DAY_S, gate.unix_s + DAY_S
    gate.enters(CAROL)
    assert gate.decides._usage.keys() == {"held", "slow", "carol"}
    assert "key slow may start 1e-06" in str(gate.refused(slow))
    gate = Gate(1, queue=1)
    gate.ask(held)
    made_room, _ = gate.ask(BOB, batch=True), gate.ask(CAROL)
    gate.unix_s += DAY_S
    gate.refused(ALICE)
    gate.leave(made_room)  # forgotten by now


def test_concurrent_requests_of_a_key_are_limited() -> None:
    gate, key = Gate(8, queue=4), Key("alice", concurrent=2)
    held = [gate.ask(key) for _ in range(2)]
    assert "key alice has 2 requests in flight, its limit" in str(gate.refused(key))
    gate.enters(BOB)
    gate.leave(*held)
    gate.enters(key)


def test_bytes_per_day_of_a_key_are_limited() -> None:
    gate, key = Gate(8), Key("alice", bytes_per_day=100)
    gate.unix_s = DAY_S * 20_000 + 10.0
    first = gate.ask(key, 80)
    assert "20 are left until midnight UTC, and the request may need 21" in str(gate.refused(key, 21))
    gate.leave(first, spent_bytes=30)
    gate.enters(key, 70)
    refusal = gate.refused(key, 1)
    assert "key alice may use 100 bytes per day, prompts included: 0 are left" in str(refusal)
    assert refusal.retry_after_ms == (DAY_S - 10) * 1000
    gate.unix_s += DAY_S
    yesterday = gate.ask(key, 100)
    gate.unix_s += DAY_S
    gate.enters(key, 100)
    gate.leave(yesterday, spent_bytes=1)
    assert "0 are left" in str(gate.refused(key, 1))
    # a date that is wrong for a moment gives no day more than its bytes
    gate.unix_s += DAY_S
    request = gate.ask(key, 100)
    gate.unix_s += DAY_S
    gate.enters(key)
    gate.unix_s -= DAY_S
    gate.enters(key)
    gate.leave(request)
    assert "100 are left" in str(gate.refused(key, 101))


# Priorities


def test_batch_requests_yield_places_and_the_queue_to_interactive_ones() -> None:
    gate = Gate(8, queue=2)
    batch = [gate.ask(ANONYMOUS, batch=True) for _ in range(8)]
    assert states(batch) == ["admitted"] * 6 + ["waits"] * 2, "a quarter is not theirs"
    gate.decides._mean_s = 4 * PATIENT_S  # as the third in line it would wait too long
    usual = [gate.ask() for _ in range(3)]
    assert states(usual) == ["admitted", "admitted", "waits"]
    assert batch[-1].state == "refused", "it made room in the queue"
    gate.leave(batch.pop(0))
    assert usual[2].state == "admitted", "and the next place goes to an interactive one"
    assert batch[5].state == "waits"
    gate.leave(*batch, *usual)
    assert gate.counts == (0, 0, 0)
    gate = Gate(8, queue=16)  # an eighth is left to them
    usual = [gate.ask() for _ in range(12)]
    batch = [gate.ask(ANONYMOUS, batch=True) for _ in range(2)]
    gate.leave(*usual[:2])
    assert states(batch) == ["admitted", "waits"]
    assert states(usual[2:]) == ["admitted"] * 7 + ["waits"] * 3
