"""Layers of the causal stream on packed rows, their products and norms by onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stages.backends.attention import Sight, attend_branches, attend_clean, attend_growing
from stages.backends.layer_graphs import AnyLayer, after_graph, before_graph
from stages.backends.onnx_session import Session
from stages.backends.packed import FEW_POSITIONS, PackedReader
from stages.backends.packed_layer import Angles
from stages.backends.rows import Rows
from stages.block import Block
from stages.families import PipelineStage
from stages.layers import LayerCache


class OnnxLayer:
    """Rows of several pieces through one layer of any family."""

    def __init__(self, part: Block | PipelineStage, layer: AnyLayer, int8: bool) -> None:
        self.heads = part.architecture.heads
        self.before = Session(before_graph(part, layer, int8))
        self.after = Session(after_graph(part, layer, int8))

    def clean(self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], seen: Sequence[Sight]) -> None:
        """The causal stream, in place. x: (rows, width); caches, seen: of each piece."""
        self._finish(x, attend_clean(self._project(x, angles), rows, self.heads, caches, seen))

    def branch(
        self, x: Tensor, rows: Rows, angles: Angles, caches: Sequence[LayerCache], branches: Sequence[int]
    ) -> None:
        """Continuations that see what is in their piece's cache, in place. branches: of each piece."""
        self._finish(x, attend_branches(self._project(x, angles), rows, self.heads, caches, branches))

    def grow(self, x: Tensor, rows: Rows, angles: Angles, shared: LayerCache, own: Tensor) -> None:
        """One more position of each continuation of the text in `shared`, in place. own: of `attend_growing`."""
        self._finish(x, attend_growing(self._project(x, angles), rows, self.heads, shared, own))

    def _project(self, x: Tensor, angles: Angles) -> Tensor:
        # a copy, so that it lies where torch's tensors do: the order of additions depends on addresses
        return self.before(x[None], *angles)[0].clone()

    def _finish(self, x: Tensor, mixed: Tensor) -> None:
        x.copy_(self.after(x[None], mixed[None])[0])


class OnnxReader(PackedReader):
    """The clean stream of a part."""

    def __init__(self, part: Block | PipelineStage, layers: Sequence[OnnxLayer], few: int = FEW_POSITIONS) -> None:
        super().__init__(part, layers, part.layers[0].mlp_in.out_features, few)

    def rows_of(self, counts: Sequence[int]) -> Rows:
        """Unpadded but for whole vectors: these kernels add up one row as they add up many."""
        return Rows.of(counts, self.hidden, least=1)

    def spread(self, factors: Tensor) -> Angles:
        """cos and sin of each row, (rows, head_dim / 2)."""
        # of keys, whose factors are not scaled, and of the half whose sine is positive
        return factors[:, 0, 1, 0, 0].contiguous(), factors[:, 1, 1, 0, 1].contiguous()
