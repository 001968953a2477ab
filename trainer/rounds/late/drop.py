"""Late work is worth nothing."""

from __future__ import annotations


class Drop:
    shares_of_all = False

    def worth(self, staleness: int) -> float:
        return 0.0
