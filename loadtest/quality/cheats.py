"""Texts that a panel must not take for human: made from human text, each to please some figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np

from loadtest.quality.prompts import Passage

PHRASE_WORDS = 4


def shuffled_words(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The true continuation with its words, cut at blanks, in another order."""
    words = passage.continuation.split(b" ")
    return b" ".join(words[i] for i in numbers.permutation(len(words)))


def shuffled_bytes(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The true continuation with its characters in another order."""
    text = passage.continuation.decode()
    return "".join(text[i] for i in numbers.permutation(len(text))).encode()


def repeated_phrase(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The first words of the true continuation, again and again."""
    phrase = b" ".join(passage.continuation.split()[:PHRASE_WORDS]) + b" "
    return _repeated(phrase, len(passage.continuation))


def copied_prompt(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The prompt, again and again."""
    return _repeated(passage.prompt, len(passage.continuation))


CHEATS: dict[str, Callable[[Passage, np.random.Generator], bytes]] = {
    "shuffled words": shuffled_words,
    "shuffled bytes": shuffled_bytes,
    "repeated phrase": repeated_phrase,
    "copied prompt": copied_prompt,
}


def cheat_texts(name: str, passages: Sequence[Passage], seed: int) -> list[bytes]:
    """One text for each passage, of the length of its true continuation."""
    numbers = np.random.default_rng(seed)
    return [CHEATS[name](passage, numbers) for passage in passages]


def _repeated(text: bytes, length: int) -> bytes:
    return bytes(islice(cycle(text), length))
