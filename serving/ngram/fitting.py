"""Fits n-grams to a text: interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, section 2.8).

p(w | h) = max(c(hw) - D, 0) / c(h) + D T(h) / c(h) p(w | h'), with c counts for the longest histories and numbers of
different symbols before hw for the shorter ones, T(h) the different symbols after h, h' the history without its first
symbol, D = n1 / (n1 + 2 n2) for each length (Ney et al. 1994), and the uniform distribution below the shortest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serving.ngram.levels import MAX_ORDER, MAX_SYMBOLS, MIN_ORDER, Level, Ngrams
from serving.spelling import BYTES_NAME
from stages.errors import InputError

LEAST_DISCOUNT, MOST_DISCOUNT = 0.1, 0.95
"""Of a text so small or odd that it has no n-gram that was seen once, or none that was seen twice."""
_SHIFT, _LOW = np.uint64(32), np.uint64((1 << 32) - 1)

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]


def fit(symbols: NDArray[np.uint32], vocabulary: int, order: int, tokenizer: str = BYTES_NAME) -> Ngrams:
    """Levels 1 to `order` of a text. symbols: (positions,), below `vocabulary`. Raises InputError."""
    if not MIN_ORDER <= order <= MAX_ORDER:
        raise InputError(f"the order of an n-gram model is {MIN_ORDER} to {MAX_ORDER}, not {order}")
    if not order < len(symbols) <= MAX_SYMBOLS:
        most = f"more than {order}, at most {MAX_SYMBOLS}"
        raise InputError(f"a text of {len(symbols)} symbols; n-grams are fitted to {most}")
    keys, sizes, counts = list[Keys](), [1], list[Numbers]()
    ids = np.zeros(len(symbols) + 1, dtype=np.int64)  # of the n-gram that ends at each position: at first the empty one
    for length in range(1, order + 1):
        runs = ids[:-1].astype(np.uint64) << _SHIFT | symbols[length - 1 :].astype(np.uint64)
        found, first, inverse, times = np.unique(runs, return_index=True, return_inverse=True, return_counts=True)
        if length > 1:
            counts[-1] = np.bincount(ids[1:][first], minlength=sizes[-1])  # what each was seen after
        keys.append(found)
        sizes.append(len(found))
        counts.append(times)
        ids = inverse
    levels = [_level(*each) for each in zip(keys, sizes, counts, strict=False)]
    return Ngrams(tuple(levels), vocabulary, tokenizer)


def _level(keys: Keys, contexts: int, counts: Numbers) -> Level:
    """keys: each context's number and its symbol, sorted; counts: of each."""
    parents = (keys >> _SHIFT).astype(np.int64)
    begins = np.searchsorted(parents, np.arange(contexts + 1))
    totals = np.bincount(parents, counts, minlength=contexts)
    shares = np.maximum(counts - _discount(counts), 0) / np.maximum(totals[parents], 1)
    lefts = np.clip(1 - np.bincount(parents, shares, minlength=contexts), 0, 1)
    return Level(
        begins.astype(np.uint32),
        lefts.astype(np.float32),
        (keys & _LOW).astype(np.uint32),
        shares.astype(np.float32),
    )


def _discount(counts: Numbers) -> float:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return min(max(once / max(once + 2 * twice, 1), LEAST_DISCOUNT), MOST_DISCOUNT)
