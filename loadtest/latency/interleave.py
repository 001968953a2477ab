"""Requests of all arms take turns in a rotating order, so that a slow moment of the machine falls on every arm."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from onesweep.loadtest.latency.floor import BookedCost, Floor, course_of
from onesweep.loadtest.workload.testbed import Testbed


class RequestSource(Protocol):
    """Requests that differ in nothing but their prompt and seed; `Arm` is one."""

    @property
    def idle_s(self) -> float:
        """Seconds without a request before each of these."""

    def call(self, number: int, seed: int) -> dict[str, Any]:
        """Arguments of one `Client.generate` or `Client.draw`: the request with this number."""


@dataclass(frozen=True, eq=False)
class Seat:
    """One arm on one testbed. `at_once`: requests made at the same time in a turn."""

    testbed: Testbed
    arm: RequestSource
    at_once: int = 1


@dataclass(frozen=True)
class Sample:
    """One request: its times at the client and its account, or the reason why it failed."""

    seed: int
    number: int = 0  # of the request among those of its arm; decides its prompt
    latency_ms: float = 0.0  # from the call to the end of the account
    first_byte_ms: float = 0.0
    floor: Floor | None = None
    account: dict[str, Any] | None = None  # `Result.as_json()`; that of pictures has their digest, too
    error: str = ""

    @property
    def booked(self) -> dict[str, Any]:
        """The account of a request that ended well."""
        assert self.account is not None
        return self.account

    @property
    def least(self) -> Floor:
        """The floor of a request that ended well."""
        assert self.floor is not None
        return self.floor

    @property
    def ratio(self) -> float:
        """Latency over floor."""
        return self.latency_ms / self.least.total_ms

    @property
    def host_ms(self) -> float:
        """Arithmetic on the hosts."""
        return float(sum(host["compute_ms"] for host in self.booked["hosts"]))

    @property
    def router_ms(self) -> float:
        """Arithmetic on the router that sweeps wait for: a drafter's."""
        return max(float(self.booked["compute_ms"] - self.booked["ahead_ms"]) - self.host_ms, 0.0)


def ended_well(samples: Sequence[Sample]) -> tuple[list[Sample], str | None]:
    """The requests that ended well, and the most frequent reason why others did not."""
    failed = Counter(sample.error for sample in samples if sample.error)
    return [sample for sample in samples if not sample.error], failed.most_common(1)[0][0] if failed else None


def take_turns(seats: Sequence[Seat], requests: int, seed: int) -> Iterator[tuple[Seat, list[Sample]]]:
    """`requests` turns of each seat, after one that warms up and is left out.

    Turn i of every seat has the same prompts and seeds. A failure is a sample like any other; a process that ended is
    started again, and the seats of its deployment are warmed up anew before the next turn.
    """
    for seat in seats:
        _turn(seat, 0, seed)
    for i in range(requests):
        # in another order each time: no arm always follows the one that leaves the machine hot or the links busy
        first = i % len(seats) if seats else 0
        for seat in (*seats[first:], *seats[:first]):
            if seat.arm.idle_s and not seat.testbed.given_up:
                time.sleep(seat.arm.idle_s)
            samples = _turn(seat, i * seat.at_once, seed)
            if any(sample.error for sample in samples):
                samples = _after_failure(seat, seats, samples, seed)
            yield seat, samples


def collect(
    seats: Sequence[Seat], requests: int, seed: int, count: Callable[[], object] = lambda: None
) -> dict[Seat, list[Sample]]:
    """All samples of each seat, in the order of their seeds. `count` is called after each turn."""
    samples: dict[Seat, list[Sample]] = {seat: [] for seat in seats}
    for seat, taken in take_turns(seats, requests, seed):
        samples[seat] += taken
        count()
    return samples


def ask_once(testbed: Testbed, arm: RequestSource, number: int, seed: int) -> Sample:
    """One request by itself."""
    (answer,) = testbed.caller.ask([arm.call(number, seed)])
    return sample_of(testbed, number, seed, answer)


def sample_of(testbed: Testbed, number: int, seed: int, answer: dict[str, Any]) -> Sample:
    """One answer of the caller, with its floor."""
    if "error" in answer:
        return Sample(seed, number, error=answer["error"])
    floor = course_of(testbed.network).floor(BookedCost.of(answer["account"]))
    return Sample(seed, number, answer["latency_ms"], answer["first_byte_ms"], floor, answer["account"])


def _turn(seat: Seat, first: int, seed: int) -> list[Sample]:
    """The requests from number `first` on; number 0 has the seed `seed`."""
    numbers = range(first, first + seat.at_once)
    if seat.testbed.given_up:
        return [Sample(seed + number, number, error=seat.testbed.given_up) for number in numbers]
    answers = seat.testbed.caller.ask([seat.arm.call(number, seed + number) for number in numbers])
    return [sample_of(seat.testbed, n, seed + n, answer) for n, answer in zip(numbers, answers, strict=True)]


def _after_failure(seat: Seat, seats: Sequence[Seat], samples: list[Sample], seed: int) -> list[Sample]:
    if seat.testbed.given_up:
        return samples
    happened = seat.testbed.mend()
    if not happened:
        return samples
    for other in seats:
        if other.testbed is seat.testbed:
            _turn(other, 0, seed)
    return [Sample(s.seed, s.number, error=f"{happened}: {s.error}") if s.error else s for s in samples]
