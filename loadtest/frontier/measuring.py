"""Requests of all arms in turns at one station: a slow moment of the machine falls on every arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.wan_bench.station import Station


@dataclass(frozen=True)
class Ask:
    """Requests that differ in prompt and seed only."""

    label: str
    request: tuple[tuple[str, Any], ...]
    """Settings for `Client.generate` besides prompt, length and seed."""


@dataclass(frozen=True)
class Answer:
    """One request: its time at the client and its account, or why it failed."""

    latency_ms: float = 0.0
    account: dict[str, Any] | None = None
    """`Result.as_json()`."""
    error: str = ""

    @property
    def booked(self) -> dict[str, Any]:
        assert self.account is not None
        return self.account

    @property
    def host_ms(self) -> float:
        return float(sum(host["compute_ms"] for host in self.booked["hosts"]))

    @property
    def router_ms(self) -> float:
        """Arithmetic on the router that sweeps wait for: a drafter's."""
        return max(float(self.booked["compute_ms"] - self.booked["ahead_ms"]) - self.host_ms, 0.0)


def take_turns(
    station: Station,
    asks: Sequence[Ask],
    prompts: Sequence[str],
    max_bytes: int,
    requests: int,
    seed: int,
    count: Callable[[], object],
) -> dict[Ask, list[Answer]]:
    """`requests` answers to each, after one that warms up and is not told of. Turn i has one prompt and seed for all.

    A failure is an answer like any other; a process that ended is started again.
    """
    answers: dict[Ask, list[Answer]] = {ask: [] for ask in asks}
    for ask in asks:
        _answer(station, ask, prompts[0], max_bytes, seed)
    for i in range(requests):
        first = i % len(asks) if asks else 0
        for ask in (*asks[first:], *asks[:first]):
            answers[ask].append(_answer(station, ask, prompts[i % len(prompts)], max_bytes, seed + i))
            count()
    return answers


def _answer(station: Station, ask: Ask, prompt: str, max_bytes: int, seed: int) -> Answer:
    if station.given_up:
        return Answer(error=station.given_up)
    call = {"prompt": prompt, "max_bytes": max_bytes, "seed": seed, **dict(ask.request)}
    (answer,) = station.caller.ask([call])
    if "error" in answer:
        happened = station.mend()
        return Answer(error=f"{happened}: {answer['error']}" if happened else answer["error"])
    return Answer(answer["latency_ms"], answer["account"])
