"""A part of a model as ONNX graphs, written node by node from the loaded module.

torch's exporter takes many seconds a graph; this takes milliseconds, and says which fused operations are meant.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from stages.ar import ArStage
from stages.block import Block
from stages.layers import Layer

OPSET, FUSED_OPSET, IR_VERSION = 20, 1, 10
INT8_LARGEST = 127
FUSED = "com.microsoft"
"""The domain of onnxruntime's own operations."""


class Graph:
    """A graph under construction. Values are named by strings; rows are (1, rows, numbers)."""

    def __init__(self, int8: bool = False) -> None:
        """:param int8: the matrices of `linear`, one scale a column; what meets them is quantised as it comes."""
        self.int8 = int8
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, value: str, name: str) -> None:
        self.op("Identity", value, to=[name])
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))

    def constant(self, value: Tensor) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value.detach().contiguous().numpy(), name))
        return name

    def op(
        self, kind: str, *inputs: str, domain: str = "", to: Sequence[str] | None = None, **attributes: float
    ) -> str:
        """Add a node; returns the name of its first output."""
        to = to or [f"value_{len(self.nodes)}"]
        node = helper.make_node(kind, inputs, to, domain=domain)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self.nodes.append(node)
        return to[0]

    def split(self, x: str, count: int, axis: int = -1) -> list[str]:
        names = [f"value_{len(self.nodes)}_{i}" for i in range(count)]
        self.op("Split", x, to=names, axis=axis, num_outputs=count)
        return names

    def linear(self, x: str, linear: nn.Linear) -> str:
        matrix = linear.weight.detach().t()
        if self.int8:
            scales = (matrix.abs().amax(dim=0) / INT8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
            integers = self.constant((matrix / scales).round().to(torch.int8))
            x = self.op("DynamicQuantizeMatMul", x, integers, self.constant(scales), domain=FUSED)
        else:
            x = self.op("MatMul", x, self.constant(matrix))
        return x if linear.bias is None else self.op("Add", x, self.constant(linear.bias))

    def norm(self, x: str, norm: nn.RMSNorm, weight: str | None = None) -> str:
        """:param weight: in place of the norm's own, a value of its own for each number."""
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        own = torch.ones_like(norm.weight) if weight else norm.weight
        x = self.op("SimplifiedLayerNormalization", x, self.constant(own), axis=-1, epsilon=eps)
        return self.op("Mul", x, weight) if weight else x

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "part", self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, FUSED_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


class LayersGraph(Graph):
    """The layers of a part, with what their attention needs as inputs: `position`, `keys_i` and `values_i`."""

    def __init__(self, part: Block | ArStage, int8: bool) -> None:
        super().__init__(int8)
        self.heads, head_dim = part.architecture.heads, part.architecture.head_dim
        self.position = self.input("position", 1, kind=TensorProto.INT64)
        self.past = [
            [self.input(f"{name}_{i}", "sequences", self.heads, "past", head_dim) for name in ("keys", "values")]
            for i in range(len(part.layers))
        ]
        self.rotary = [self.constant(table) for table in part.rotary]

    def clean(self, x: str, layer: Layer, index: int) -> str:
        """A layer of the causal stream; its new keys and values become outputs."""
        mixed, k, v = self._attend(self.norm(x, layer.attention_norm), layer, index, causal=True)
        self.output(k, f"new_keys_{index}")
        self.output(v, f"new_values_{index}")
        x = self.op("Add", x, self.linear(mixed, layer.attention_out))
        return self.op("Add", x, self._mlp(self.norm(x, layer.mlp_norm), layer))

    def noisy(self, x: str, layer: Layer, index: int, modulation: Sequence[str]) -> str:
        """A layer for noisy slots. modulation: as in `PackedLayer.noisy`, but for the norm of weight one."""
        weight_a, shift_a, gate_a, weight_m, shift_m, gate_m = modulation
        x_in = self.op("Add", self.norm(x, layer.attention_norm, weight_a), shift_a)
        mixed, _, _ = self._attend(x_in, layer, index, causal=False)
        x = self.op("Add", x, self.op("Mul", self.linear(mixed, layer.attention_out), gate_a))
        x_in = self.op("Add", self.norm(x, layer.mlp_norm, weight_m), shift_m)
        return self.op("Add", x, self.op("Mul", self._mlp(x_in, layer), gate_m))

    def _attend(self, x: str, layer: Layer, index: int, causal: bool) -> tuple[str, str, str]:
        q, k, v = self.split(self.linear(x, layer.qkv), 3)
        q, k = (self.op("RotaryEmbedding", each, self.position, *self.rotary, domain=FUSED) for each in (q, k))
        mixed = self.op(
            "MultiHeadAttention",
            *(q, k, v, "", "", "", *self.past[index]),
            domain=FUSED,
            # the past is read only where the whole is asked for
            to=[f"{name}_{index}" for name in ("mixed", "all_keys", "all_values")],
            num_heads=self.heads,
            unidirectional=int(causal),
        )
        return mixed, k, v

    def _mlp(self, x: str, layer: Layer) -> str:
        return self.linear(self.op("Gelu", self.linear(x, layer.mlp_in)), layer.mlp_out)


def read_graph(part: Block | ArStage, int8: bool = False) -> onnx.ModelProto:
    """The clean stream: x (sequences, positions, width) -> x, and each layer's new keys and values, shaped like x."""
    graph = LayersGraph(part, int8)
    x = graph.input("x", "sequences", "positions", part.architecture.width)
    for i, layer in enumerate(part.layers):
        x = graph.clean(x, layer, i)
    graph.output(x, "features")
    return graph.model()


def denoise_graph(block: Block, int8: bool = False) -> onnx.ModelProto:
    """Noisy slots: z, estimate, likelihood (1, slots, code_dim), each scaled, modulation (layers x 6, 1, width) and
    temperature (1,) -> logits (1, slots, 256) and points (1, slots, code_dim)."""
    graph = LayersGraph(block, int8)
    a = block.architecture
    z, estimate, likelihood = (graph.input(name, 1, "slots", a.code_dim) for name in ("z", "estimate", "likelihood"))
    modulation = graph.split(graph.input("modulation", a.layers * 6, 1, a.width), a.layers * 6, axis=0)
    x = graph.op("Add", graph.linear(z, block.state_in), graph.linear(estimate, block.estimate_in))
    x = graph.op("Add", x, graph.constant(block.slot))
    for i, layer in enumerate(block.layers):
        x = graph.noisy(x, layer, i, modulation[6 * i : 6 * i + 6])
    logits = graph.linear(graph.norm(x, block.noisy_norm), block.noisy_head)
    logits = graph.op("Add", logits, graph.op("MatMul", likelihood, graph.constant(block.codes.t())))
    graph.output(logits, "logits")
    odds = graph.op("Softmax", graph.op("Div", logits, graph.input("temperature", 1)), axis=-1)
    points = graph.op("MatMul", odds, graph.constant(block.codes))
    graph.output(points, "points")
    return graph.model()


def head_graph(stage: ArStage, int8: bool = False) -> onnx.ModelProto:
    """The last stage's head: x (1, positions, width) -> logits (1, positions, 256)."""
    assert stage.norm is not None, "only the last stage has a head"
    assert stage.head is not None
    graph = Graph(int8)
    x = graph.input("x", 1, "positions", stage.architecture.width)
    graph.output(graph.linear(graph.norm(x, stage.norm), stage.head), "logits")
    return graph.model()
