"""Continuations of one text that grow together, on packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.backends.base import Continuations
from stages.layers import LayerCache

if TYPE_CHECKING:
    from stages.backends.packed import PackedReader


class Growing(Continuations):
    """What they share is neither copied nor read once for each."""

    def __init__(self, reader: PackedReader, shared: Sequence[LayerCache], room: int, count: int) -> None:
        self.reader, self.shared, self.length = reader, shared, 0
        _, kv_heads, _, dim = shared[0].keys.shape
        self._own = torch.empty(len(shared), 2, count, kv_heads, room, dim)

    def select(self, branches: Tensor) -> None:
        layers, both, _, kv_heads, room, dim = self._own.shape
        chosen = torch.empty(layers, both, len(branches), kv_heads, room, dim)
        chosen[..., : self.length, :] = self._own[..., : self.length, :][:, :, branches]
        self._own = chosen

    @torch.inference_mode()
    def read(self, source: Tensor) -> Tensor:
        count, at = len(source), self.shared[0].length + self.length
        rows = self.reader.rows_of([1] * count)
        x, angles = rows.pack([self.reader.input(source)]), self.reader.angles_of(rows, [at] * count)
        self.length += 1
        for layer, shared, own in zip(self.reader.layers, self.shared, self._own, strict=True):
            layer.grow(x, rows, angles, shared, own[..., : self.length, :])
        return x[:count]
