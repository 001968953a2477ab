"""The knee: how many users a mode carries before latency gives way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loadtest.load.run import LoadResult

DOUBLED = 2.0
"""Over the knee, p95 is more than this many times that of one user."""
GROWTH = 1.05
"""Over the knee, twice the users bring less than this many times the throughput."""


@dataclass(frozen=True)
class Climb:
    """One mode with more and more users, and why it ended."""

    mode: str
    results: list[LoadResult]
    knee: int | None
    """Most users that the mode was seen to carry; None when not even one was answered."""
    ended: str
    """What the next number of users did, in words; empty where the knee lies beyond the most that were tried."""

    @property
    def interrupted(self) -> bool:
        return any(result.interrupted for result in self.results)

    @property
    def knee_result(self) -> LoadResult | None:
        return next((result for result in self.results if result.users == self.knee), None)


def climb(mode: str, most_users: int, measure: Callable[[str, int], LoadResult]) -> Climb:
    """Double the users until p95 has doubled or throughput grows no more.

    :param measure: one load run of a mode with a number of users.
    """
    results: list[LoadResult] = []
    for users in levels(most_users):
        results.append(measure(mode, users))
        reason = over_the_knee(results)
        if reason:
            before = results[-2].users if len(results) > 1 else None
            return Climb(mode, results, before, reason)
    return Climb(mode, results, results[-1].users, "")


def levels(most_users: int) -> Iterable[int]:
    """1, 2, 4, 8 ... and `most_users` at the end."""
    users = 1
    while users < most_users:
        yield users
        users *= 2
    yield most_users


def over_the_knee(results: list[LoadResult]) -> str:
    """Why the last of these runs, each with more users than the one before, is over the knee; empty when it is not."""
    first, last = results[0].figures, results[-1].figures
    if results[-1].interrupted:
        return "it was interrupted"
    if last.p95_ms is None or first.p95_ms is None:
        return "no request was answered"
    if len(results) == 1:
        return ""
    if last.p95_ms > DOUBLED * first.p95_ms:
        return f"p95 is {last.p95_ms / first.p95_ms:.1f} x that of one user"
    growth = last.throughput_rps / results[-2].figures.throughput_rps if results[-2].figures.throughput_rps else 0.0
    if growth < GROWTH:
        return f"throughput grew by a factor of {growth:.2f} only"
    return ""
