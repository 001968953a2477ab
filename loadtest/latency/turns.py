"""Requests of all variants take turns in a rotating order: a slow moment of the machine falls on every one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.latency.floor import BookedCost, Floor, course_of
from loadtest.latency.settings import Length
from loadtest.workload.prompts import NOVEL, Prompts
from loadtest.workload.testbed import Testbed
from loadtest.workload.variants import ModeVariant


@dataclass(frozen=True)
class RequestSeries:
    """Requests that differ in nothing but their prompt and seed: one row of the table."""

    variant: ModeVariant
    length: Length
    prompts: Prompts = NOVEL

    def call(self, number: int, seed: int) -> dict[str, Any]:
        """Arguments of one `Client.generate` or `Client.draw`: the request with this number."""
        asked, count = self.prompts.text(number), self.length.count
        if self.length.draws:
            return {"classes": asked, "levels": count, "seed": seed, **self.variant.request()}
        return {"prompt": asked, f"max_{self.length.unit}": count, "seed": seed, **self.variant.request()}


@dataclass(frozen=True, eq=False)
class Seat:
    """One series on one testbed. `at_once`: requests made at the same time in a turn."""

    testbed: Testbed
    series: RequestSeries
    at_once: int = 1


@dataclass(frozen=True)
class Sample:
    """One request: its times at the client and its account, or the reason why it failed."""

    seed: int
    number: int = 0  # of the request of its series; decides its prompt
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
        # in another order each time: no series always follows the one that leaves the machine hot or the links busy
        first = i % len(seats) if seats else 0
        for seat in (*seats[first:], *seats[:first]):
            samples = _turn(seat, i * seat.at_once, seed)
            if any(sample.error for sample in samples):
                samples = _after_failure(seat, seats, samples, seed)
            yield seat, samples


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
    answers = seat.testbed.caller.ask([seat.series.call(number, seed + number) for number in numbers])
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
