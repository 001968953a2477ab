"""Late work counts less, by a factor for each round that it is late."""

from __future__ import annotations


class Stale:
    shares_of_all = False

    def __init__(self, discount: float) -> None:
        self.discount = discount

    def worth(self, staleness: int) -> float:
        return self.discount**staleness
