"""A layer on packed rows: what layers.py says, in fewer and cheaper operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.attention import Sight, attend_branches, attend_clean, attend_growing, attend_noisy, rotate_rows
from stages.backends.rows import Rows
from stages.layers import Layer, LayerCache

Angles = tuple[Tensor, Tensor]


class PipelineLayer(Protocol):
    """A layer of any family."""

    def clean(
        self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], seen: Sequence[Sight]
    ) -> None: ...

    def branch(
        self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], branches: Sequence[int]
    ) -> None: ...

    def grow(self, x: Tensor, rows: Rows, angles: Angles, shared: LayerCache, own: Tensor) -> None: ...


class PackedNorm:
    """RMSNorm. torch's own takes seven operations, and the time of small ones is overhead."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        (width,) = norm.normalized_shape
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        self.weight = norm.weight.detach() * width**0.5
        self.least = torch.full((1, 1), eps * width)  # a tensor: a Python number costs a conversion in each call

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, width)."""
        return self.directions(x).mul_(self.weight)

    def directions(self, x: Tensor) -> Tensor:
        """Without the weight, and divided by the root of the width."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # x / sqrt(mean of squares + eps) = x sqrt(width) / sqrt(sum of squares + eps width)
        return x.mul(torch.addcmul(self.least, length, length).rsqrt_())


class PackedLayer:
    """Rows of several pieces through one layer. What it takes of the layer's matrices are views, not copies."""

    def __init__(self, layer: Layer) -> None:
        self.heads, self.modulation = layer.heads, layer.modulation
        self.attention_norm, self.mlp_norm = PackedNorm(layer.attention_norm), PackedNorm(layer.mlp_norm)
        linears = (layer.qkv, layer.attention_out, layer.mlp_in, layer.mlp_out)
        self.qkv, self.attention_out, self.mlp_in, self.mlp_out = (linear.weight.detach().t() for linear in linears)

    def clean(self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], seen: Sequence[Sight]) -> None:
        """The causal stream, in place. x: (rows, width); angles: cos and sin of `rotary_rows`.

        caches, seen: of each piece.
        """
        qkv = self._project(self.attention_norm(x), angles)
        x.addmm_(attend_clean(qkv, rows, self.heads, caches, seen), self.attention_out)
        hidden = self.mlp_norm(x).mm(self.mlp_in)
        # gelu of a transposed view: torch hands contiguous tensors to oneDNN, whose call costs 5 us more
        x.addmm_(F.gelu(hidden.t()).t(), self.mlp_out)

    def branch(
        self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], branches: Sequence[int]
    ) -> None:
        """Continuations that see what is in their piece's cache, in place. branches: of each piece."""
        qkv = self._project(self.attention_norm(x), angles)
        x.addmm_(attend_branches(qkv, rows, self.heads, caches, branches), self.attention_out)
        x.addmm_(F.gelu(self.mlp_norm(x).mm(self.mlp_in)), self.mlp_out)

    def grow(self, x: Tensor, rows: Rows, angles: Angles, shared: LayerCache, own: Tensor) -> None:
        """One more position of each continuation of the text in `shared`, in place. own: of `attend_growing`."""
        qkv = self._project(self.attention_norm(x), angles)
        x.addmm_(attend_growing(qkv, rows, self.heads, shared, own), self.attention_out)
        x.addmm_(F.gelu(self.mlp_norm(x).mm(self.mlp_in)), self.mlp_out)

    def noisy(self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], modulation: Tensor) -> None:
        """Noisy slots, in place. modulation: (6, rows or 1, width) of `modulate`."""
        weight_a, shift_a, gate_a, weight_m, shift_m, gate_m = modulation
        qkv = self._project(torch.addcmul(shift_a, self.attention_norm.directions(x), weight_a), angles)
        x.addcmul_(attend_noisy(qkv, rows, self.heads, caches).mm(self.attention_out), gate_a)
        hidden = torch.addcmul(shift_m, self.mlp_norm.directions(x), weight_m).mm(self.mlp_in)
        x.addcmul_(F.gelu(hidden).mm(self.mlp_out), gate_m)

    def modulate(self, condition: Tensor) -> Tensor:
        """AdaLN's numbers for one noise level, ready to use: condition (1, condition_dim) -> (6, width)."""
        assert self.modulation is not None, "a layer of an AR model has no noisy slots"
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)[0].chunk(6)
        weight_a, weight_m = self.attention_norm.weight * (1 + scale_a), self.mlp_norm.weight * (1 + scale_m)
        return torch.stack([weight_a, shift_a, 1 + gate_a, weight_m, shift_m, 1 + gate_m])

    def _project(self, x: Tensor, angles: Angles) -> Tensor:
        """Queries, keys and values, queries and keys rotated: (rows, 3 width)."""
        qkv = x.mm(self.qkv)
        rotate_rows(qkv, self.heads, *angles)
        return qkv
