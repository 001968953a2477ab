"""Texts in the symbols of a checkpoint: how long they are for its model, and what it read and wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path

from serving.spelling import Spelling
from serving.spellings import read_spellings
from stages.manifest import read_manifest


def spelling_of(directory: Path) -> Spelling:
    """How the model of a checkpoint spells. Raises OnesweepError where its tokenizer is missing or damaged."""
    return read_spellings(directory).named(read_manifest(directory).digest())


def spelled(spelling: Spelling, prompt: bytes) -> list[int]:
    """A prompt in symbols. prompt: UTF-8 where they are tokens."""
    return spelling.alphabet.symbols(asyncio.run(spelling.spell(prompt)))


def continued(spelling: Spelling, prompt: bytes, output: bytes) -> tuple[list[int], list[int]]:
    """A prompt and what was written after it, each in symbols.

    A text is all that is left of the symbols that were written: they are spelled anew, together with the prompt where
    that leaves the prompt's own symbols as they are.
    """
    before, whole = spelled(spelling, prompt), spelled(spelling, prompt + output)
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    return before, spelling.alphabet.symbols(spelling.plain(output.decode()))
