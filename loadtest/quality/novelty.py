"""What an output has from the training text, and what it has not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loadtest.quality.words import whole_words, words_of

SPAN = 32
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class TrainingText:
    """The words and spans of a text."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words_of(self.raw.decode(errors="replace")))

    @cached_property
    def _spans(self) -> NDArray[np.uint64]:
        return np.sort(_hashes(self.raw))

    def unseen_words(self, prompts: Sequence[bytes], outputs: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """For each output: words that are not in this text, and all words. Words that the ends may cut do not count."""
        each = [whole_words(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        return [sum(word not in self.words for word in words) for words in each], [len(words) for words in each]

    def copied_spans(self, outputs: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """For each output: runs of SPAN bytes that are in this text, and all runs. By 64-bit hashes."""
        each = [_hashes(output) for output in outputs]
        return [int(_is_in(spans, self._spans).sum()) for spans in each], [len(spans) for spans in each]


def _hashes(text: bytes) -> NDArray[np.uint64]:
    """A polynomial hash of every run of SPAN bytes, by doubling: H_2k(i) = H_k(i) B^k + H_k(i + k)."""
    hashes = np.frombuffer(text, np.uint8).astype(np.uint64) + np.uint64(1)
    length, power = 1, _FACTOR
    with np.errstate(over="ignore"):
        while length < SPAN:
            hashes = hashes[:-length] * power + hashes[length:]
            length, power = 2 * length, power * power
    return hashes


def _is_in(wanted: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    if not len(known):
        return np.zeros(len(wanted), bool)
    return known[np.minimum(np.searchsorted(known, wanted), len(known) - 1)] == wanted
