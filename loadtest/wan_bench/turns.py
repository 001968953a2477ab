"""Requests of all arms take turns, in an order that rotates: a slow moment of the machine falls on every arm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.wan_bench.arms import Arm
from loadtest.wan_bench.floor import Account, Floor
from loadtest.wan_bench.station import Station


@dataclass(frozen=True, eq=False)
class Seat:
    """One arm at one station. `at_once`: requests made at the same time in a turn."""

    station: Station
    arm: Arm
    at_once: int = 1


@dataclass(frozen=True)
class Sample:
    """One request: its times and its account, or why it failed."""

    seed: int
    number: int = 0
    """Which of its arm's requests, and so its prompt."""
    latency_ms: float = 0.0
    """At the client, from the call to the end of the account."""
    first_byte_ms: float = 0.0
    floor: Floor | None = None
    account: dict[str, Any] | None = None
    """`Result.as_json()`."""
    error: str = ""

    @property
    def ratio(self) -> float:
        """Latency over floor."""
        assert self.floor is not None
        return self.latency_ms / self.floor.total_ms


def take_turns(seats: Sequence[Seat], requests: int, seed: int) -> Iterator[tuple[Seat, list[Sample]]]:
    """`requests` turns of each seat, after one that warms up and is not told of.

    Turn i of every seat has the same prompts and seeds. A failure is a sample like any other; when a process ended, it
    is started again and the seats of its deployment are warmed up anew before the next turn.
    """
    for seat in seats:
        _turn(seat, 0, seed)
    for i in range(requests):
        first = i % len(seats)
        for seat in (*seats[first:], *seats[:first]):
            if seat.arm.idle_s and not seat.station.given_up:
                time.sleep(seat.arm.idle_s)
            samples = _turn(seat, i * seat.at_once, seed)
            if any(sample.error for sample in samples):
                samples = _after_failure(seat, seats, samples, seed)
            yield seat, samples


def _turn(seat: Seat, first: int, seed: int) -> list[Sample]:
    """The requests with the numbers from `first` on; that with number 0 has the seed `seed`."""
    numbers = range(first, first + seat.at_once)
    if seat.station.given_up:
        return [Sample(seed + number, number, error=seat.station.given_up) for number in numbers]
    answers = seat.station.caller.ask([seat.arm.call(number, seed + number) for number in numbers])
    return [sample_of(seat.station, n, seed + n, answer) for n, answer in zip(numbers, answers, strict=True)]


def sample_of(station: Station, number: int, seed: int, answer: dict[str, Any]) -> Sample:
    """One answer of the caller, with its floor."""
    if "error" in answer:
        return Sample(seed, number, error=answer["error"])
    floor = station.course.floor(Account.of(answer["account"]))
    return Sample(seed, number, answer["latency_ms"], answer["first_byte_ms"], floor, answer["account"])


def _after_failure(seat: Seat, seats: Sequence[Seat], samples: list[Sample], seed: int) -> list[Sample]:
    if seat.station.given_up:
        return samples
    happened = seat.station.mend()
    if not happened:
        return samples
    for other in seats:
        if other.station is seat.station:
            _turn(other, 0, seed)
    return [Sample(s.seed, s.number, error=f"{happened}: {s.error}") if s.error else s for s in samples]
