"""Stages of the Llama family on packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.backends.attention import Sight, attend_branches, attend_clean, attend_growing
from stages.backends.packed import PackedReader, PackedStage, PipelineRunner, normed_head
from stages.backends.packed_layer import Angles, PackedNorm
from stages.backends.product import Product
from stages.backends.rows import Rows
from stages.families import PipelineStage
from stages.layers import LayerCache
from stages.llama.architecture import LlamaArchitecture
from stages.llama.stage import LlamaLayer, LlamaStage


class PackedLlamaLayer:
    """Rows of several pieces through one layer."""

    def __init__(self, layer: LlamaLayer) -> None:
        a = layer.architecture
        self.heads, self.rotated = a.heads, a.heads + a.kv_heads
        self.attention_norm, self.mlp_norm = PackedNorm(layer.attention_norm), PackedNorm(layer.mlp_norm)
        linears = (layer.qkv, layer.attention_out, layer.mlp_in, layer.mlp_out)
        self.qkv, self.attention_out, self.mlp_in, self.mlp_out = map(Product, linears)

    def clean(self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], seen: Sequence[Sight]) -> None:
        """The causal stream, in place. x: (rows, width); caches, seen: of each piece."""
        qkv = self._project(x, angles)
        x.add_(self.attention_out(attend_clean(qkv, rows, self.heads, caches, seen)))
        self._think(x)

    def branch(
        self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], branches: Sequence[int]
    ) -> None:
        """Continuations that see what is in their piece's cache, in place. branches: of each piece."""
        qkv = self._project(x, angles)
        x.add_(self.attention_out(attend_branches(qkv, rows, self.heads, caches, branches)))
        self._think(x)

    def grow(self, x: Tensor, rows: Rows, angles: Angles, shared: LayerCache, own: Tensor) -> None:
        """One more position of each continuation of the text in `shared`, in place. own: of `attend_growing`."""
        qkv = self._project(x, angles)
        x.add_(self.attention_out(attend_growing(qkv, rows, self.heads, shared, own)))
        self._think(x)

    def _project(self, x: Tensor, angles: Angles) -> Tensor:
        """Queries, keys and values, queries and keys rotated: (rows, qkv_width)."""
        qkv = self.qkv(self.attention_norm(x))
        cos, sin = angles
        both = qkv[:, : cos.shape[1] * cos.shape[2] * cos.shape[3]].view(cos.shape)
        swapped = both.roll(1, 2)
        both.mul_(cos).addcmul_(swapped, sin)
        return qkv

    def _think(self, x: Tensor) -> None:
        gate, up = self.mlp_in(self.mlp_norm(x)).chunk(2, dim=1)
        x.add_(self.mlp_out(F.silu(gate).mul_(up)))


class LlamaReader(PackedReader):
    """The tokens' way through a stage."""

    def __init__(self, stage: LlamaStage) -> None:
        self.architecture = stage.architecture
        super().__init__(stage, [PackedLlamaLayer(layer) for layer in stage.layers], stage.architecture.mlp_width)

    def rows_of(self, counts: Sequence[int]) -> Rows:
        return Product.rows(counts, self.hidden)

    def spread(self, factors: Tensor) -> Angles:
        cos, sin = (_by_rotated_head(each, self.architecture) for each in factors.unbind(1))
        return cos, sin


class PackedLlamaStage(PipelineRunner):
    """Takes the stage's matrices over: each is freed when it is laid out anew, so that memory stays near one stage."""

    def __init__(self, stage: LlamaStage) -> None:
        reader = LlamaReader(stage)
        super().__init__(reader, normed_head(stage, None if stage.head is None else Product(stage.head)))


def packed_stage(stage: PipelineStage) -> PipelineRunner:
    """The runner of a stage of any family."""
    return PackedLlamaStage(stage) if isinstance(stage, LlamaStage) else PackedStage(stage)


def _by_rotated_head(factors: Tensor, a: LlamaArchitecture) -> Tensor:
    """(rows, 2, 1, 2, half) of `rotary_rows`, for queries and for keys -> (rows, heads + kv_heads, 2, half)."""
    queries, keys = factors.squeeze(2).unbind(1)
    return torch.cat(
        [queries.unsqueeze(1).expand(-1, a.heads, -1, -1), keys.unsqueeze(1).expand(-1, a.kv_heads, -1, -1)], dim=1
    )
