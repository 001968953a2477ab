"""Settings of a request that shape the distribution that a symbol is drawn from.

A pure function of logits and symbols so far: `ar`, and what verifies guesses of it, draw from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shaping:
    """Settings that shape a distribution. The defaults change nothing, not even a bit."""

    # The most likely symbols, so many; 0: all. Of equally likely ones those with the lower numbers.
    top_k: int = 0
    # Of these, the most likely that have this share together (Holtzman et al. 2019, arXiv 1904.09751).
    top_p: float = 1.0
    # Of these, those at least so likely, as a share of the most likely one (Nguyen et al. 2024, arXiv 2407.01082).
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        """True if it leaves symbols out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def filtered(self, scores: Floats) -> Floats:
        """`scores` with -inf for symbols that are left out; the most likely one stays.

        scores: (rows, vocabulary), ln of probabilities at the request's temperature, but for a constant in each row.
        """
        if not self.filters:
            return scores
        kept = np.full_like(scores, -np.inf)
        for row, result in zip(scores, kept, strict=True):
            symbols = self._kept(row)
            result[symbols] = row[symbols]
        return kept

    def _kept(self, row: Floats) -> NDArray[np.intp]:
        symbols = np.arange(len(row))
        if 0 < self.top_k < len(row):  # a whole vocabulary takes 4 ms to sort, the few that may stay no time
            symbols = np.flatnonzero(row >= np.partition(row, -self.top_k)[-self.top_k])
        # stable: of equal ones the lower number comes first, on every machine
        symbols = symbols[np.argsort(-row[symbols], kind="stable")][: self.top_k or len(row)]
        odds = np.exp(row[symbols] - row[symbols[0]])
        count = len(symbols)
        if self.top_p < 1:
            before = np.cumsum(odds)
            count = 1 + int((before[:-1] < self.top_p * before[-1]).sum())
        return symbols[: min(count, int((odds >= self.min_p).sum()))]


PLAIN = Shaping()
