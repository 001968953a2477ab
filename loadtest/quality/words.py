"""Words of a text, as the panel counts them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


def words_of(text: str) -> list[str]:
    """Runs of letters, with apostrophes inside, in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def whole_words(prompt: bytes, output: bytes) -> list[str]:
    """The words of an output, without those that its two ends may have cut."""
    before, text = prompt.decode(errors="replace"), output.decode(errors="replace")
    found = list(_WORD.finditer(text))
    if found and found[0].start() == 0 and before and _WORD.fullmatch(before[-1]):
        found = found[1:]
    if found and found[-1].end() == len(text):
        found = found[:-1]
    return [match.group().lower() for match in found]


def distinct_pairs(words: Sequence[str]) -> float | None:
    """Share of neighbouring pairs of words that are different (Li et al. 2016, distinct-2); None without a pair."""
    pairs = list(pairwise(words))
    return len(set(pairs)) / len(pairs) if pairs else None
