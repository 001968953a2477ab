"""The difference of two ways of training that were made with the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles 0.975 of Student's distribution with 1, 2, ... degrees of freedom."""
MAX_SEEDS = len(STUDENT) + 1


@dataclass(frozen=True)
class Difference:
    """Mean of the first less the second, seed by seed, and half of its 95 % interval; None with one seed."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (f" ± {self.half:.4f}" if self.half is not None else " (one seed: no interval)")


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Student's interval for the mean of paired differences."""
    each = [a - b for a, b in zip(first, second, strict=True)]
    if len(each) < 2:
        return Difference(each[0], None)
    return Difference(statistics.mean(each), STUDENT[len(each) - 2] * statistics.stdev(each) / math.sqrt(len(each)))
