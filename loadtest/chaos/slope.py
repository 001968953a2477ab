"""Whether a figure grows: a straight line through samples, by least squares, and how sure its slope is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_95 = 1.96
LEAST_SAMPLES = 10


@dataclass(frozen=True)
class Slope:
    """A slope a minute, and half the width of its 95 % interval."""

    per_minute: float
    margin: float

    def grows(self, floor: float) -> bool:
        """Whether it is surely above 0, and worth a word: above `floor`, too."""
        return self.per_minute - self.margin > 0 and self.per_minute > floor


def slope_of(at_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """The line's slope; None of fewer than LEAST_SAMPLES.

    Samples that follow each other are alike, so they count as n (1 - r) / (1 + r) independent ones, where r is the
    correlation of each residual with the next (Bayley and Hammersley 1946).
    """
    n = len(at_s)
    if n < LEAST_SAMPLES:
        return None
    mean_s, mean = math.fsum(at_s) / n, math.fsum(values) / n
    spread = math.fsum((t - mean_s) ** 2 for t in at_s)
    if spread == 0:
        return None
    slope = math.fsum((t - mean_s) * (v - mean) for t, v in zip(at_s, values, strict=True)) / spread
    residuals = [v - mean - slope * (t - mean_s) for t, v in zip(at_s, values, strict=True)]
    squares = math.fsum(r * r for r in residuals)
    alike = math.fsum(a * b for a, b in itertools.pairwise(residuals)) / squares if squares else 0.0
    alike = min(max(alike, 0.0), 0.99)
    fewer = (1 + alike) / (1 - alike)
    margin = NORMAL_95 * math.sqrt(squares / (n - 2) / spread * fewer)
    return Slope(slope * 60, margin * 60)
