"""Many continuations of one text, written together by the local model. The text itself is read, and kept, once."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.candidates import Candidates, Floats, draw
from serving.local import LocalSequence, odds_of
from stages.randomness import Purpose, uniforms

ROUND = 1 << 16
"""Branches that one round may have: each branch of each round draws from a stream of its own."""
DRAWN_AT_ONCE = 1 << 18
"""Odds that are looked at together: 2 MB, whatever the vocabulary."""


class Branches:
    """Writes candidates after a sequence's text, a symbol of all of them at a time."""

    def __init__(self, sequence: LocalSequence) -> None:
        self.sequence = sequence

    async def write(self, text: bytes, length: int, count: int, number: int) -> Candidates:
        """`count` continuations of `text`, each of `length` symbols. Raises nothing that a user could cause.

        :param number: of the round. Another round draws other numbers, even for the same positions.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.sequence.model.compute, self._write, text, length, count, number)

    @torch.inference_mode()
    def _write(self, text: bytes, length: int, count: int, number: int) -> Candidates:
        begin, sequence, alphabet = time.perf_counter(), self.sequence, self.sequence.model.alphabet
        logits = sequence.text.logits_after(text).expand(count, -1)
        streams = [
            uniforms(sequence.seed, Purpose.CANDIDATE, alphabet.count(text), length, 1, number * ROUND + branch)[:, 0]
            for branch in range(count)
        ]
        u = np.stack(streams, axis=1)
        forks = sequence.text.fork(count, length)
        written, nats = np.empty((count, length), dtype=np.int64), np.empty((count, length))
        for i in range(length):
            written[:, i], nats[:, i] = drawn(logits, sequence.temperature, u[i])
            if i + 1 < length:
                logits = forks.read(written[:, i])
        return Candidates([alphabet.encode(row) for row in written], nats, (time.perf_counter() - begin) * 1000)


def rows_at_once(vocabulary: int) -> int:
    """Rows of odds that are looked at together."""
    return max(1, DRAWN_AT_ONCE // vocabulary)


def drawn(logits: Tensor, temperature: float, u: Floats) -> tuple[NDArray[np.int64], Floats]:
    """One symbol for each row, and ln of its odds: (rows,) both. logits: (rows, vocabulary); u: (rows,), in (0, 1]."""
    rows = rows_at_once(logits.shape[1])
    chosen, nats = np.empty(len(logits), dtype=np.int64), np.empty(len(logits))
    for at in range(0, len(logits), rows):
        part = slice(at, at + rows)
        odds = odds_of(logits[part], temperature)
        chosen[part] = draw(odds, u[part])
        nats[part] = np.log(np.take_along_axis(odds, chosen[part, None], axis=1)[:, 0])
    return chosen, nats
