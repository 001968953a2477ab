"""How varied texts are, in bits: low entropy cheats a judge, so it stands beside every judge's figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from loadtest.quality.words import words_of

GRAM = 4
GROUPS = 20
"""Parts of which each is left out once to estimate a standard error."""

Counts = Counter[object]
T = TypeVar("T")


def symbol_counts(text: Sequence[int]) -> Counts:
    """Bytes, or tokens."""
    return Counter(text)


def gram_counts(text: Sequence[int]) -> Counts:
    """Runs of four; tokens come as a tuple."""
    return Counter(text[i : i + GRAM] for i in range(len(text) - GRAM + 1))


def word_counts(text: bytes) -> Counts:
    return Counter(words_of(text.decode(errors="replace")))


def pooled_entropy(texts: Sequence[T], counts: Callable[[T], Counts]) -> tuple[float, float] | None:
    """Entropy in bits of what `counts` finds in all texts together, and its standard error; None of nothing.

    The plug-in estimate: it grows with the number of texts, so compare equal numbers. The error is the jackknife's over
    groups of texts, because drawing texts twice, as a bootstrap does, would itself lower the entropy.
    """
    each = [counts(text) for text in texts]
    whole = sum_counts(each)
    if not whole:
        return None
    groups = [each[i::GROUPS] for i in range(min(GROUPS, len(each)))]
    if len(groups) < 2:
        return entropy_bits(whole), float("nan")
    without = np.array([entropy_bits(_less(whole, sum_counts(group))) for group in groups])
    error = float(np.sqrt((len(groups) - 1) * np.mean((without - without.mean()) ** 2)))
    return entropy_bits(whole), error


def entropy_bits(counts: Counts) -> float:
    if not counts:
        return 0.0
    shares: NDArray[np.float64] = np.fromiter(counts.values(), float)
    shares = shares / shares.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def sum_counts(parts: Iterable[Counts]) -> Counts:
    total: Counts = Counter()
    for part in parts:
        total.update(part)
    return total


def _less(whole: Counts, part: Counts) -> Counts:
    """`whole` without `part`, which it contains."""
    left = Counter(whole)
    left.subtract(part)
    return +left
