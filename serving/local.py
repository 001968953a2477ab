"""The small AR model on the router's own machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import torch

from stages.ar import new_caches
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.backends.base import CleanPiece
from stages.checkpoint import load_ar
from stages.randomness import sample_bytes
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
        self.stages = [backend.stage(stage) for stage in model.stages]
        self.context_bytes = model.architecture.context_bytes
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

    def _write(self, text: bytes, count: int) -> tuple[bytes, float]:
        begin, whole = time.perf_counter(), text
        self._go_back(text)
        for _ in range(count):
            logits = self._next(whole[len(self._read) :])
            whole += sample_bytes(logits, self.temperature, self.seed, len(whole))
        return whole[len(text) :], (time.perf_counter() - begin) * 1000

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
