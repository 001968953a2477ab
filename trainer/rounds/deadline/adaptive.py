"""A quorum, then a grace: the others have until so many times the median of the arrivals seen so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


class Adaptive:
    def __init__(self, quorum: float, grace: float, limit_s: float) -> None:
        """:param quorum: share of the expected workers.

        :param grace: times the median arrival, at least 1.
        :param limit_s: seconds after which it ends without a quorum.
        """
        self.quorum, self.grace, self.limit_s = quorum, grace, limit_s

    def closes_at(self, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
        needed = max(1, math.ceil(self.quorum * expected))
        if len(arrivals) < needed:
            return self.limit_s
        usual = median((*past, *arrivals))
        return min(self.limit_s, max(arrivals[needed - 1], self.grace * usual))
