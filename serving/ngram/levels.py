"""The n-grams of one length, and all lengths together: arrays that are searched, not walked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.spelling import BYTES_NAME
from stages.errors import InputError

MIN_ORDER, MAX_ORDER = 2, 8
MAX_SYMBOLS = 1 << 24
"""Of text that a model is fitted to: no level has more n-grams."""
NEARLY = 1e-3
"""How far from 1 the odds of a damaged file may add up."""


@dataclass(frozen=True)
class Level:
    """N-grams of one length n, in the order of their contexts, which are the n-grams of length n - 1.

    What follows context i are the entries from begins[i] to begins[i + 1], in the order of their symbols.
    """

    begins: NDArray[np.uint32]
    """(contexts + 1,)"""
    lefts: NDArray[np.float32]
    """Of each context: the weight of what the context one symbol shorter says. (contexts,)"""
    symbols: NDArray[np.uint32]
    """The last symbol of each: (n-grams,)"""
    shares: NDArray[np.float32]
    """What its context gives it by itself: (n-grams,)"""

    def following(self, context: int) -> slice:
        """The entries that follow a context."""
        return slice(int(self.begins[context]), int(self.begins[context + 1]))

    def find(self, context: int, symbol: int) -> int:
        """The entry of `symbol` after a context; -1 where it was never seen there."""
        found = self.following(context)
        at = found.start + int(np.searchsorted(self.symbols[found], symbol))
        return at if at < found.stop and self.symbols[at] == symbol else -1

    def check(self, contexts: int, vocabulary: int) -> None:
        """Raise InputError unless this can be a level after so many contexts."""
        begins, count = self.begins.astype(np.int64), len(self.symbols)
        if len(begins) != contexts + 1 or len(self.lefts) != contexts or len(self.shares) != count:
            raise InputError("its arrays do not fit each other")
        if begins[0] != 0 or begins[-1] != count or (np.diff(begins) < 0).any():
            raise InputError("its contexts are not in order")
        first = np.zeros(count + 1, dtype=bool)
        first[begins] = True
        rising = np.diff(self.symbols.astype(np.int64)) > 0
        if count and (self.symbols.max() >= vocabulary or not rising[~first[1:-1]].all()):
            raise InputError(f"its symbols are not in order, or not below {vocabulary}")
        if not (_odds(self.shares) and _odds(self.lefts)):
            raise InputError("its odds are not between 0 and 1")
        totals = self.lefts.astype(np.float64) + _sums(self.shares, begins)
        if np.abs(totals - 1).max(initial=0) > NEARLY:
            raise InputError("its odds do not add up to 1")


@dataclass(frozen=True)
class Ngrams:
    """A fitted model: level k - 1 has the n-grams of length k."""

    levels: tuple[Level, ...]
    vocabulary: int
    tokenizer: str = BYTES_NAME
    """What its symbols are, as in `Spelling`."""

    @property
    def order(self) -> int:
        return len(self.levels)

    @property
    def count(self) -> int:
        return sum(len(level.symbols) for level in self.levels)

    def check(self) -> None:
        """Raise InputError unless every context and symbol is where it can be found."""
        contexts = 1
        for length, level in enumerate(self.levels, 1):
            try:
                level.check(contexts, self.vocabulary)
            except InputError as error:
                raise InputError(f"its {length}-grams are damaged: {error}") from None
            contexts = len(level.symbols)

    def base(self) -> NDArray[np.float64]:
        """p of every symbol where nothing is known of what is before it: (vocabulary,)."""
        level = self.levels[0]
        p = np.full(self.vocabulary, level.lefts[0] / self.vocabulary, dtype=np.float64)
        p[level.symbols] += level.shares
        return np.asarray(p / p.sum())

    def contexts(self, ending: Sequence[int]) -> list[tuple[Level, int]]:
        """What says something after a text with this ending, shortest first: a level, and the context in it."""
        found = list[tuple[Level, int]]()
        for length in range(1, min(len(ending), self.order - 1) + 1):
            context = 0
            for level, symbol in zip(self.levels, ending[len(ending) - length :], strict=False):
                context = level.find(context, symbol)
                if context < 0:
                    return found  # what was not seen has no longer context that was
            found.append((self.levels[length], context))
        return found


def _odds(values: NDArray[np.float32]) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())  # false for NaN too


def _sums(values: NDArray[np.float32], begins: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum of the values from each of `begins` to the next."""
    running = np.concatenate([[0.0], values.astype(np.float64).cumsum()])
    return np.asarray(running[begins[1:]] - running[begins[:-1]])
