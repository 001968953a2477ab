"""What an n-gram model says about the next symbol."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serving.ngram.levels import Ngrams

Floats = NDArray[np.float64]


class NgramModel:
    """Reads endings of texts, of `order` - 1 symbols at most."""

    def __init__(self, ngrams: Ngrams) -> None:
        self.ngrams, self._base = ngrams, ngrams.base()

    def probabilities(self, ending: Sequence[int]) -> Floats:
        """Of every symbol after a text with this ending: (vocabulary,), together 1."""
        p = self._base.copy()
        for level, context in self.ngrams.contexts(ending):
            found = level.following(context)
            p *= level.lefts[context]
            p[level.symbols[found]] += level.shares[found]
        return p

    def cross_entropy(self, symbols: Sequence[int]) -> float:
        """Mean nats of each symbol after those before it."""
        nats = 0.0
        for at, symbol in enumerate(symbols):
            p = float(self._base[symbol])
            for level, context in self.ngrams.contexts(symbols[max(at - self.ngrams.order + 1, 0) : at]):
                found = level.find(context, symbol)
                p = p * float(level.lefts[context]) + (float(level.shares[found]) if found >= 0 else 0.0)
            nats -= math.log(p)
        return nats / max(len(symbols), 1)
