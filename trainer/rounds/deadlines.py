"""Deadlines, which close a round, and what an update is worth that comes after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from trainer.blocks.round_settings import RoundSettings


class Deadline(Protocol):
    """A pure function of durations, in seconds since the begin of the round that they belong to."""

    def closes_at(self, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
        """The time at which the round ends if nothing else comes; None where it waits for more.

        arrivals: of this round, in time, ascending; expected: workers; past: arrivals of earlier rounds, in time.
        A round in which all that are expected have come ends at once, whatever this says; one to which nothing came
        does not end.
        """
        ...


class LockstepDeadline:
    """No deadline: a round waits for all that are expected.

    A coordinator expects nothing of a worker whose lease ran out, so that its round ends with the others' updates.
    """

    def closes_at(self, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
        return None


@dataclass(frozen=True)
class FixedDeadline:
    """A round ends after so many seconds."""

    limit_s: float

    def closes_at(self, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
        return self.limit_s


@dataclass(frozen=True)
class AdaptiveDeadline:
    """A quorum, then a grace: the others have until so many times the median of the arrivals seen so far."""

    quorum: float  # share of the expected workers
    grace: float  # times the median arrival, at least 1
    limit_s: float  # seconds after which the round ends without a quorum

    def closes_at(self, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
        needed = max(1, math.ceil(self.quorum * expected))
        if len(arrivals) < needed:
            return self.limit_s
        usual = median((*past, *arrivals))
        return min(self.limit_s, max(arrivals[needed - 1], self.grace * usual))


def new_deadline(settings: RoundSettings) -> Deadline:
    match settings.deadline:
        case "lockstep":
            return LockstepDeadline()
        case "fixed":
            return FixedDeadline(settings.deadline_s)
        case "adaptive":
            return AdaptiveDeadline(settings.quorum, settings.grace, settings.deadline_s)


@dataclass(frozen=True)
class LatePolicy:
    """The worth of an update that comes after its round was closed."""

    discount: float  # factor of its weight for each round that was closed since its own was open; at 0 it is dropped
    # Whether an update moves the weights by its share of all workers, instead of its share of those that came. A mean
    # over those that came lets a single update move the weights as far as all together, and a late one take weight from
    # those of its new round. With this all updates of a run add up to what they would have in time. *Idea* of ours; it
    # is also what the eager correction takes for granted.
    shares_of_all: bool = False

    def worth(self, staleness: int) -> float:
        return self.discount**staleness


def new_late(settings: RoundSettings) -> LatePolicy:
    match settings.late:
        case "drop":
            return LatePolicy(0.0)
        case "stale":
            return LatePolicy(settings.stale_discount)
        case "keep":
            return LatePolicy(1.0)
        case "add":
            return LatePolicy(1.0, shares_of_all=True)
