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
from stages.checkpoint import load_ar
from stages.layers import LayerCache
from stages.randomness import sample_bytes
from stages.refusal import Refusal

BYTES_PER_TURN = 16
"""Bytes generated before other requests get a turn."""


class LocalModel:
    """Generates on a thread of its own, a few bytes of one request at a time."""

    def __init__(self, directory: Path) -> None:
        """Load and gate the weights. Raises CheckpointError."""
        self.model = load_ar(directory)
        self.context_bytes = self.model.architecture.context_bytes
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="local")

    async def generate(
        self, prompt: bytes, max_bytes: int, temperature: float, seed: int, deadline_unix_ms: int
    ) -> AsyncGenerator[tuple[bytes, float], None]:
        """(text, compute milliseconds) pieces. Raises Refusal when the deadline passes."""
        loop = asyncio.get_running_loop()
        caches = self._caches(len(prompt) + max_bytes)
        pending, position, left = prompt, 0, max_bytes
        while left:
            if deadline_unix_ms <= time.time() * 1000:
                raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
            count = min(BYTES_PER_TURN, left)
            text, compute_ms = await loop.run_in_executor(
                self.compute, self._turn, caches, pending, position, count, temperature, seed
            )
            yield text, compute_ms
            position += len(pending) + count - 1
            pending, left = text[-1:], left - count

    @torch.inference_mode()
    def _turn(
        self, caches: list[list[LayerCache]], pending: bytes, position: int, count: int, temperature: float, seed: int
    ) -> tuple[bytes, float]:
        """Read `pending` at `position`, then sample `count` bytes, reading back all but the last."""
        begin, text = time.perf_counter(), b""
        for _ in range(count):
            source = torch.frombuffer(bytearray(pending), dtype=torch.uint8).long()[None]
            logits = self.model(source, caches)[0, -1:]
            position += len(pending)
            pending = sample_bytes(logits, temperature, seed, position)
            text += pending
        return text, (time.perf_counter() - begin) * 1000

    def _caches(self, capacity: int) -> list[list[LayerCache]]:
        a = self.model.architecture
        return [new_caches(a.layers, a, capacity) for _ in range(a.parts)]
