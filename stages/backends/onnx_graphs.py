"""An ONNX graph, written node by node from loaded modules.

torch's exporter takes many seconds a graph; this takes milliseconds, and chooses the fused operations itself.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.architecture import GROUP
from stages.model.few_bits import GroupedLinear, Int8Linear, QuantLinear
from stages.model.layers import Layer, TiedHead
from stages.model.llama import LlamaLayer
from stages.model.pipeline import PipelineStage

OPSET, FUSED_OPSET, IR_VERSION = 20, 1, 10
FUSED = "com.microsoft"  # the domain of onnxruntime's own operations
INT8_ZERO, INT4_ZERO = 128, 8  # the codes that stand for zero
# Groups of an 8-bit row that a kernel multiplies at once. Each leftover group takes four times as long, so rows are
# padded with groups of zeros. SmolLM2's rows of 18 groups take 0.85 of the time as 20, four of them 0.7.
GROUPS_AT_ONCE = 4
OUTSIDE = Path(__file__)  # stands in for the file of matrices that come from memory
MAX_OFFSET = 7 * 16 + 7  # two digits of 4 bits, each from -8 to 7
# The accuracy level that rounds a matrix's inputs to int8 as well, each group of each row by itself: no row's scale
# depends on another row.
ROUNDED_IN_INT8 = 4


# A separate product would take a fifth of the layer's time, and offsets in 4 bits would differ from the file's.
class OffsetGroups:
    """The offsets of a matrix, `count` a row, as additional groups of its rows. In 8 bits, which are two digits of 4:
    groups of high digits, then groups of low ones. They multiply the sums of x's groups, repeated `copies` times: each
    digit counts at one place."""

    def __init__(self, count: int) -> None:
        self.high_groups = -(-count // GROUP)
        high_places = self.high_groups * GROUP
        self.copies = -(-(high_places + count) // count)
        self.groups = -(-self.copies * count // GROUP)
        self.low_places = high_places + (torch.arange(count) - high_places) % count

    def fill(self, offsets: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the groups of some rows. offsets: (rows, count) float32; codes: (rows, groups, GROUP / 2), packed as by
        `QuantLinear.neighbours`; scales: (rows, groups)."""
        digits = torch.full((len(offsets), self.groups * GROUP), INT4_ZERO, dtype=torch.uint8)
        largest = offsets.abs().amax(1, keepdim=True) / MAX_OFFSET
        whole = (offsets / largest.masked_fill(largest == 0, 1)).round_().to(torch.int16)
        high = (whole + INT4_ZERO) >> 4
        digits[:, : offsets.shape[1]] += high.to(torch.uint8)
        digits[:, self.low_places] += (whole - 16 * high).to(torch.uint8)
        codes.copy_((digits[:, ::2] | digits[:, 1::2] << 4).view(codes.shape))
        scales[:] = largest
        scales[:, : self.high_groups] *= 16


class Graph:
    """A graph under construction. Values are named by strings; rows are (1, rows, numbers)."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        # Constants that the model names but does not contain: protobuf messages are limited to 2 GB.
        self.matrices: dict[str, Tensor] = {}
        self.few_bits: list[str] = []  # names of constants that are codes, or scales of codes
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, *shape: int | str) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def output(self, value: str, name: str) -> None:
        for names in (each for node in self.nodes for each in (node.input, node.output)):
            names[:] = [name if each == value else each for each in names]
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))

    def constant(self, value: Tensor) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value.detach().contiguous().numpy(), name))
        return name

    def matrix(self, value: Tensor) -> str:
        name = f"matrix_{len(self.matrices)}"
        self.matrices[name] = value = value.detach().contiguous()
        kind = helper.np_dtype_to_tensor_dtype(value.numpy().dtype)
        outside = TensorProto(name=name, data_type=kind, dims=value.shape, data_location=TensorProto.EXTERNAL)
        outside.external_data.add(key="location", value=OUTSIDE.name)
        self.constants.append(outside)
        return name

    def op(
        self, kind: str, *inputs: str, domain: str = "", to: Sequence[str] | None = None, **attributes: float | str
    ) -> str:
        """Add a node; returns the name of its first output."""
        to = to or [f"value_{len(self.nodes)}"]
        node = helper.make_node(kind, inputs, to, domain=domain)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self.nodes.append(node)
        return to[0]

    def split(self, x: str, *sizes: int) -> list[str]:
        names = [f"value_{len(self.nodes)}_{i}" for i in range(len(sizes))]
        self.op("Split", x, self.constant(torch.tensor(sizes)), to=names, axis=-1)
        return names

    def linear(self, x: str, linear: nn.Linear | TiedHead, scale: Tensor | None = None) -> str:
        """Add a linear map; weights of few bits stay as they are.

        :param scale: of each output number, (out,).
        """
        if isinstance(linear, GroupedLinear):
            x = self._grouped(x, linear, scale)
        else:
            weight = linear.weight if scale is None else linear.weight * scale[:, None]
            x = self.op("FusedMatMul", x, self.matrix(weight), domain=FUSED, transB=1)
        if linear.bias is None:
            return x
        return self.op("Add", x, self.constant(linear.bias if scale is None else linear.bias * scale))

    def _grouped(self, x: str, linear: GroupedLinear, scale: Tensor | None) -> str:
        factor = torch.ones(len(linear.scales), 1) if scale is None else scale[:, None]
        if isinstance(linear, Int8Linear):
            scales = linear.scales.float() * factor
            codes = (linear.codes.view(torch.uint8) ^ INT8_ZERO).unflatten(1, (-1, GROUP))
            if missing := -codes.shape[1] % GROUPS_AT_ONCE:
                x = self.op("Pad", x, self.constant(torch.tensor([0, 0, 0, 0, 0, missing * GROUP])))
                codes = F.pad(codes, (0, 0, 0, missing), value=INT8_ZERO)
                scales = F.pad(scales, (0, missing))
            return self._few_bits(x, codes, scales, codes.shape[1] * GROUP)
        assert isinstance(linear, QuantLinear)
        rows, count = linear.scales.shape
        # A code means itself less INT4_ZERO. A further offset adds the sum of a group of x, times the offset.
        has_rest = any((linear.offsets[piece] + INT4_ZERO * linear.scales[piece]).any() for piece in linear.pieces())
        more, end, numbers = OffsetGroups(count), count, linear.in_features
        if has_rest:
            apart = self.op("Reshape", x, self.constant(torch.tensor([0, 0, -1, GROUP])))
            sums = self.op("ReduceSum", apart, self.constant(torch.tensor([-1])), keepdims=0)
            x = self.op("Concat", x, *[sums] * more.copies, axis=-1)
            end, numbers = end + more.groups, numbers + more.copies * count
        # by numpy, which uses pages of 2 MB: a session reads the matrices across to lay them out anew
        codes = torch.from_numpy(np.empty((rows, end, GROUP // 2), np.uint8))
        scales = torch.from_numpy(np.empty((rows, end), np.float32))
        for piece in linear.pieces():  # pieces that fit the cache: whole matrices take twice the time
            linear.neighbours(piece, codes[piece, :count])
            torch.mul(linear.scales[piece], factor[piece], out=scales[piece, :count])
            if has_rest:
                rest = linear.offsets[piece] * factor[piece] + INT4_ZERO * scales[piece, :count]
                more.fill(rest, codes[piece, count:], scales[piece, count:])
        return self._few_bits(x, codes, scales, numbers)

    def _few_bits(self, x: str, codes: Tensor, scales: Tensor, numbers: int) -> str:
        """A few-bit product. codes: (out, groups, bytes) uint8; scales: (out, groups) float32; numbers: of x."""
        named = [self.matrix(codes), self.matrix(scales.flatten())]
        self.few_bits += named
        return self.op(
            "MatMulNBits",
            *(x, *named),
            domain=FUSED,
            K=numbers,
            N=len(codes),
            bits=8 * codes.shape[2] // GROUP,
            block_size=GROUP,
            accuracy_level=ROUNDED_IN_INT8,
        )

    def norm_groups(self, x: str, norm: nn.RMSNorm, numbers: int, scale: float = 1.0) -> str:
        """Normalize x's `numbers` in groups of the norm's size, and multiply by `scale`."""
        (size,) = norm.normalized_shape
        apart, whole = (self.constant(torch.tensor([0, 0, *shape])) for shape in ((numbers // size, size), (numbers,)))
        scaled = nn.RMSNorm(size, eps=norm.eps)
        scaled.weight.data.copy_(norm.weight * scale)
        return self.op("Reshape", self.norm(self.op("Reshape", x, apart), scaled), whole)

    def norm(self, x: str, norm: nn.RMSNorm | nn.Identity) -> str:
        if isinstance(norm, nn.Identity):
            return x
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        return self.op("SimplifiedLayerNormalization", x, self.constant(norm.weight), axis=-1, epsilon=eps)

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "part", self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, FUSED_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


# A layer of the causal stream as two graphs, before and after attention, for layers of any family.
AnyLayer = Layer | LlamaLayer


def before_graph(part: PipelineStage, layer: AnyLayer) -> Graph:
    """The graph up to a layer's attention: x (1, rows, width), cos and sin of each row (rows, head_dim / 2) -> queries,
    keys and values (1, rows, numbers of all heads), queries and keys rotated, queries divided by the root of
    head_dim."""
    graph = Graph()
    _project(graph, part, layer, graph.input("x", 1, "rows", part.architecture.width))
    return graph


def after_graph(part: PipelineStage, layer: AnyLayer, following: AnyLayer | None) -> Graph:
    """The graph from a layer's attention to that of the `following` layer: x (1, rows, width), attention's result (1,
    rows, heads x head_dim), cos and sin -> x after the layer, and the outputs of `before_graph` for it; without the
    latter for the last layer."""
    graph, a = Graph(), part.architecture
    x = graph.input("x", 1, "rows", a.width)
    mixed = graph.input("mixed", 1, "rows", a.heads * a.head_dim)
    added = graph.linear(mixed, layer.attention_out)
    x = graph.op("Add", x, graph.norm(added, layer.attention_after) if isinstance(layer, LlamaLayer) else added)
    hidden = graph.linear(graph.norm(x, layer.mlp_norm), layer.mlp_in)
    if isinstance(layer, LlamaLayer):
        gate, up = graph.split(hidden, *[layer.architecture.mlp_width] * 2)
        if layer.architecture.activation == "silu":
            gate = graph.op("QuickGelu", gate, domain=FUSED, alpha=1.0)
        else:
            gate = graph.op("Gelu", gate, approximate="tanh")
        hidden = graph.op("Mul", gate, up)
    else:
        hidden = graph.op("Gelu", hidden)
    added = graph.linear(hidden, layer.mlp_out)
    x = graph.op("Add", x, graph.norm(added, layer.mlp_after) if isinstance(layer, LlamaLayer) else added)
    graph.output(x, "features")
    if following is not None:
        _project(graph, part, following, "features")
    return graph


def _project(graph: Graph, part: PipelineStage, layer: AnyLayer, x: str) -> None:
    """Add the output `qkv` of `before_graph`, and its inputs cos and sin."""
    a = part.architecture
    tables = [graph.input(name, "rows", a.head_dim // 2) for name in ("cos", "sin")]
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    scale = torch.ones(queries + 2 * keys)
    norms = (layer.q_norm, layer.k_norm) if isinstance(layer, LlamaLayer) else (None, None)
    query_scale = layer.architecture.query_scale if isinstance(layer, LlamaLayer) else a.head_dim**-0.5
    if norms[0] is None:  # a norm would remove the scale again
        scale[:queries] = query_scale
    qkv = graph.linear(graph.norm(x, layer.attention_norm), layer.qkv, scale)
    if norms[0] is None or norms[1] is None:
        rotated, values = graph.split(qkv, queries + keys, keys)
    else:
        q, k, values = graph.split(qkv, queries, keys, keys)
        q, k = graph.norm_groups(q, norms[0], queries, query_scale), graph.norm_groups(k, norms[1], keys)
        rotated = graph.op("Concat", q, k, axis=-1)
    first = graph.constant(torch.tensor([0]))  # the tables are for these rows
    rotated = graph.op("RotaryEmbedding", rotated, first, *tables, domain=FUSED)
    graph.output(graph.op("Concat", rotated, values, axis=-1), "qkv")


def product_graph(linear: nn.Linear | TiedHead) -> Graph:
    """The graph of a linear map: x (1, rows, in) -> (1, rows, out)."""
    graph = Graph()
    graph.output(graph.linear(graph.input("x", 1, "rows", "numbers"), linear), "out")
    return graph
