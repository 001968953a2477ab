"""A block's noisy slots as one graph: a chunk has rows enough by itself, so each piece is computed alone."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto
from torch import nn

from stages.backends.graph import FUSED, Graph
from stages.block import Block
from stages.layers import Layer


def denoise_graph(block: Block, int8: bool = False) -> Graph:
    """z, estimate, likelihood (1, slots, code_dim), each scaled, modulation (layers x 6, 1, width), temperature (1,),
    `position` of the first slot (1,), and of each layer the clean `keys_i` and `values_i`
    (1, heads, past, head_dim) -> logits (1, slots, 256) and points (1, slots, code_dim)."""
    graph = _NoisyGraph(block, int8)
    a = block.architecture
    z, estimate, likelihood = (graph.input(name, 1, "slots", a.code_dim) for name in ("z", "estimate", "likelihood"))
    modulation = graph.split(graph.input("modulation", a.layers * 6, 1, a.width), *[1] * a.layers * 6, axis=0)
    x = graph.op("Add", graph.linear(z, block.state_in), graph.linear(estimate, block.estimate_in))
    x = graph.op("Add", x, graph.constant(block.slot))
    for i, layer in enumerate(block.layers):
        x = graph.layer(x, layer, i, modulation[6 * i : 6 * i + 6])
    logits = graph.linear(graph.norm(x, block.noisy_norm), block.noisy_head)
    logits = graph.op("Add", logits, graph.op("MatMul", likelihood, graph.constant(block.codes.t())))
    graph.output(logits, "logits")
    odds = graph.op("Softmax", graph.op("Div", logits, graph.input("temperature", 1)), axis=-1)
    points = graph.op("MatMul", odds, graph.constant(block.codes))
    graph.output(points, "points")
    return graph


class _NoisyGraph(Graph):
    """Layers, with what their attention needs as inputs."""

    def __init__(self, block: Block, int8: bool) -> None:
        super().__init__("columns" if int8 else "float32")
        self.heads, self.width = block.architecture.heads, block.architecture.width
        self.position = self.input("position", 1, kind=TensorProto.INT64)
        self.past = [
            [
                self.input(f"{name}_{i}", 1, self.heads, "past", block.architecture.head_dim)
                for name in ("keys", "values")
            ]
            for i in range(len(block.layers))
        ]
        self.rotary = [self.constant(table) for table in block.rotary]

    def layer(self, x: str, layer: Layer, index: int, modulation: Sequence[str]) -> str:
        """modulation: as in `PackedLayer.noisy`, but for a norm of weight one."""
        weight_a, shift_a, gate_a, weight_m, shift_m, gate_m = modulation
        x_in = self._modulated(x, layer.attention_norm, weight_a, shift_a)
        x = self.op(
            "Add", x, self.op("Mul", self.linear(self._attend(x_in, layer, index), layer.attention_out), gate_a)
        )
        hidden = self.linear(self._modulated(x, layer.mlp_norm, weight_m, shift_m), layer.mlp_in)
        return self.op("Add", x, self.op("Mul", self.linear(self.op("Gelu", hidden), layer.mlp_out), gate_m))

    def _modulated(self, x: str, norm: nn.RMSNorm, weight: str, shift: str) -> str:
        return self.op("Add", self.norm(x, norm, weight), shift)

    def _attend(self, x: str, layer: Layer, index: int) -> str:
        q, k, v = self.split(self.linear(x, layer.qkv), *[self.width] * 3)
        q, k = (self.op("RotaryEmbedding", each, self.position, *self.rotary, domain=FUSED) for each in (q, k))
        return self.op(
            "MultiHeadAttention",
            *(q, k, v, "", "", "", *self.past[index]),
            domain=FUSED,
            # the past is read only where the whole is asked for
            to=[f"{name}_{index}" for name in ("mixed", "all_keys", "all_values")],
            num_heads=self.heads,
        )
