"""Many continuations of one text, written together by the local model. The text itself is read, and kept, once."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from serving.candidates import Candidates, draw
from serving.local import LocalSequence, odds_of
from stages.ar import ArStage
from stages.layers import Layer, LayerCache, rotate
from stages.randomness import Purpose, uniforms

ROUND = 1 << 16
"""Branches that one round may have: each branch of each round draws from a stream of its own."""


class Branches:
    """Writes candidates after a sequence's text, a byte of all of them at a time."""

    def __init__(self, sequence: LocalSequence) -> None:
        self.sequence = sequence

    async def write(self, text: bytes, length: int, count: int, number: int) -> Candidates:
        """`count` continuations of `text`, each of `length` bytes. Raises nothing that a user could cause.

        :param number: of the round. Another round draws other numbers, even for the same positions.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.sequence.model.compute, self._write, text, length, count, number)

    @torch.inference_mode()
    def _write(self, text: bytes, length: int, count: int, number: int) -> Candidates:
        begin, sequence = time.perf_counter(), self.sequence
        logits = sequence.logits_after(text).expand(count, -1)
        streams = [
            uniforms(sequence.seed, Purpose.CANDIDATE, len(text), length, 1, number * ROUND + branch)[:, 0]
            for branch in range(count)
        ]
        u = np.stack(streams, axis=1)
        grown = [Grown(stage, caches, length, count) for stage, caches in zip(*sequence.parts, strict=True)]
        written = np.empty((count, length), dtype=np.uint8)
        nats = np.empty((count, length))
        rows = np.arange(count)
        for i in range(length):
            odds = odds_of(logits, sequence.temperature)
            written[:, i] = chosen = draw(odds, u[i])
            nats[:, i] = np.log(odds[rows, chosen])
            if i + 1 < length:
                x = torch.from_numpy(chosen)
                for part in grown:
                    x = part.read(x)
                logits = grown[-1].stage.next_byte(x)
        return Candidates([row.tobytes() for row in written], nats, (time.perf_counter() - begin) * 1000)


class Grown:
    """What the branches add to a stage's caches, and their way through its layers."""

    def __init__(self, stage: ArStage, shared: list[LayerCache], length: int, count: int) -> None:
        a = stage.architecture
        self.stage, self.shared, self.length = stage, shared, 0
        self.own = torch.empty(len(shared), 2, count, a.heads, length, a.head_dim)

    def select(self, branches: Tensor) -> None:
        """Go on with these branches: any of them, any number of times. branches: indices."""
        self.own = self.own[:, :, branches]

    def read(self, source: Tensor) -> Tensor:
        """One more position of every branch. source: bytes (branches,) or hidden states (branches, width)."""
        x = source if self.stage.embedding is None else self.stage.embedding(source)
        at = self.shared[0].length + self.length
        rotary = self.stage.rotary[:, at : at + 1]
        self.length += 1
        for layer, shared, own in zip(self.stage.layers, self.shared, self.own, strict=True):
            x = x + layer.attention_out(self._attend(layer, x, rotary, shared, own))
            x = x + layer.mlp_out(F.gelu(layer.mlp_in(layer.mlp_norm(x))))
        return x

    def _attend(self, layer: Layer, x: Tensor, rotary: Tensor, shared: LayerCache, own: Tensor) -> Tensor:
        count, width = x.shape
        q, k, v = layer.qkv(layer.attention_norm(x)).view(count, 3, layer.heads, -1).unbind(1)
        q, k = rotate(q, rotary) * (width // layer.heads) ** -0.5, rotate(k, rotary)
        own[0, :, :, self.length - 1], own[1, :, :, self.length - 1] = k, v
        keys, values = own[:, :, :, : self.length]
        shared_keys, shared_values = (stored[0] for stored in shared.stored())
        old = (q.transpose(0, 1) @ shared_keys.transpose(1, 2)).transpose(0, 1)  # (branches, heads, shared positions)
        new = (keys @ q[..., None])[..., 0]
        weights = torch.cat([old, new], dim=2).softmax(-1)
        old, new = weights.split([shared.length, self.length], dim=2)
        mixed = (old.transpose(0, 1) @ shared_values).transpose(0, 1) + (new[:, :, None] @ values)[:, :, 0]
        return mixed.reshape(count, width)
