"""The interface of deadlines: when a round is closed. Pure functions of durations; no clock in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Deadline(Protocol):
    """All times are seconds since the begin of the round that they belong to."""

    def closes_at(self, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
        """When the round ends if nothing else comes; None where it waits for more.

        arrivals: of this round, in time, ascending; expected: workers; past: arrivals of earlier rounds, in time.
        A round in which all that are expected have come ends at once, whatever this says; one to which nothing came
        does not end.
        """
        ...
