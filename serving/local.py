"""The small AR model on the router's own machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from stages.ar import ArStage, new_caches
from stages.architecture import VOCABULARY
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.backends.base import CleanPiece
from stages.checkpoint import load_ar
from stages.layers import LayerCache
from stages.manifest import read_manifest
from stages.randomness import sample_symbols
from stages.refusal import Refusal
from stages.sweep import clean_pieces

BYTES_PER_TURN = 16
"""Bytes generated before other requests get a turn."""


class LocalModel:
    """Generates on a thread of its own, a few bytes of one request at a time."""

    def __init__(self, directory: Path) -> None:
        """Load and gate the weights. Raises CheckpointError."""
        model, backend = load_ar(directory), backend_named(DEFAULT_BACKEND)
        self.architecture = model.architecture
        self.digest = read_manifest(directory).digest()
        self.weights = list(model.stages)
        self.stages = [backend.stage(stage) for stage in model.stages]
        self.positions = model.architecture.positions
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="local")

    async def generate(
        self, prompt: bytes, max_bytes: int, temperature: float, seed: int, deadline_unix_ms: int
    ) -> AsyncGenerator[tuple[bytes, float], None]:
        """(text, compute milliseconds) pieces. Raises Refusal when the deadline passes."""
        sequence = LocalSequence(self, len(prompt) + max_bytes, temperature, seed)
        text, left = prompt, max_bytes
        while left:
            if deadline_unix_ms <= time.time() * 1000:
                raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
            piece, compute_ms = await sequence.after(text, min(BYTES_PER_TURN, left))
            yield piece, compute_ms
            text, left = text + piece, left - len(piece)


@dataclass(frozen=True)
class Guesses:
    """Bytes that the local model drew, with the odds that it drew them by."""

    text: bytes
    odds: NDArray[np.float64]
    """Of all 256 bytes at each place: (bytes, 256)."""
    compute_ms: float


class LocalSequence:
    """One text that the local model has read, and may write on."""

    def __init__(self, model: LocalModel, capacity: int, temperature: float, seed: int) -> None:
        """:param capacity: most bytes that are read."""
        self.model, self.temperature, self.seed = model, temperature, seed
        a = model.architecture
        self._caches = [new_caches(a.layers, a, capacity) for _ in model.stages]
        self._read = b""

    async def after(self, text: bytes, count: int) -> tuple[bytes, float]:
        """`count` bytes sampled after `text`, and the milliseconds that they took.

        `text` may differ from what was read before: the sequence goes back to where they part.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.model.compute, self._write, text, count)

    async def guess(self, text: bytes, count: int) -> Guesses:
        """The same bytes as `after`, with their odds."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.model.compute, self._guess, text, count)

    @property
    def parts(self) -> tuple[list[ArStage], list[list[LayerCache]]]:
        """The model's stages, and the caches of each."""
        return self.model.weights, self._caches

    def logits_after(self, text: bytes) -> torch.Tensor:
        """Read all of `text`; logits (1, 256) of the byte after it. On the compute thread only."""
        self._go_back(text)
        return self._next(text[len(self._read) :])

    def _write(self, text: bytes, count: int) -> tuple[bytes, float]:
        begin = time.perf_counter()
        written, _ = self._draw(text, count)
        return written, (time.perf_counter() - begin) * 1000

    def _guess(self, text: bytes, count: int) -> Guesses:
        begin = time.perf_counter()
        written, logits = self._draw(text, count)
        odds = odds_of(torch.cat(logits), self.temperature) if logits else np.empty((0, VOCABULARY))
        return Guesses(written, odds, (time.perf_counter() - begin) * 1000)

    def _draw(self, text: bytes, count: int) -> tuple[bytes, list[torch.Tensor]]:
        whole, logits = text, list[torch.Tensor]()
        self._go_back(text)
        for _ in range(count):
            logits.append(self._next(whole[len(self._read) :]))
            whole += sample_symbols(logits[-1], self.temperature, self.seed, len(whole))
        return whole[len(text) :], logits

    def _go_back(self, text: bytes) -> None:
        """Forget what is not the beginning of `text`, and its last byte: that one is read to go on."""
        keep = 0
        for ours, theirs in zip(self._read, text[:-1], strict=False):
            if ours != theirs:
                break
            keep += 1
        self._read = self._read[:keep]
        for caches in self._caches:
            for cache in caches:
                cache.length = keep

    def _next(self, text: bytes) -> torch.Tensor:
        """Read `text`; logits (1, 256) of the byte after it."""
        for piece in clean_pieces(torch.frombuffer(bytearray(text), dtype=torch.uint8).long()):
            x = piece
            for stage, caches in zip(self.model.stages, self._caches, strict=True):
                x = stage.read([CleanPiece(x, caches)])[0]
        self._read += text
        return self.model.stages[-1].next_byte([x[-1:]])[0]


def odds_of(logits: torch.Tensor, temperature: float) -> NDArray[np.float64]:
    """Probabilities of the bytes at a temperature; at 0 the likeliest has 1. logits: (rows, 256), as the result."""
    scores: NDArray[np.float64] = logits.double().numpy()
    scores = scores - scores.max(axis=1, keepdims=True)
    if temperature == 0:
        return np.eye(scores.shape[1])[scores.argmax(axis=1)]
    with np.errstate(over="ignore"):
        odds = np.exp(scores / temperature)
    return np.asarray(odds / odds.sum(axis=1, keepdims=True))
