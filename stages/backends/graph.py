"""An ONNX graph, written node by node from loaded modules.

torch's exporter takes many seconds a graph; this takes milliseconds, and says which fused operations are meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from stages.tied_head import TiedHead

OPSET, FUSED_OPSET, IR_VERSION = 20, 1, 10
FUSED = "com.microsoft"
"""The domain of onnxruntime's own operations."""
INT8_LARGEST, INT8_ZERO = 127, 128
GROUP = 32
"""Neighbouring numbers of a row, of a matrix and of what meets it, that share a scale."""
ROUNDED_IN_INT8 = 4
"""The accuracy level at which what meets the matrix is rounded to int8 as well, each group of each row by itself."""

Precision = Literal["float32", "columns", "groups"]
"""Of a graph's matrices. Both others are int8: with one scale a column, where what meets them has one scale for all of
its rows, which is fastest for many rows; or with one scale a group, where no row's scale depends on another row."""


class Graph:
    """A graph under construction. Values are named by strings; rows are (1, rows, numbers)."""

    def __init__(self, precision: Precision = "float32") -> None:
        self.precision = precision
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.matrices: dict[str, Tensor] = {}
        """Constants that the model names and does not contain: a message of protobuf ends at 2 GB."""
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

    def matrix(self, value: Tensor) -> str:
        name = f"matrix_{len(self.matrices)}"
        self.matrices[name] = value = value.detach().contiguous()
        kind = helper.np_dtype_to_tensor_dtype(value.numpy().dtype)
        outside = TensorProto(name=name, data_type=kind, dims=value.shape, data_location=TensorProto.EXTERNAL)
        outside.external_data.add(key="location", value="memory")
        self.constants.append(outside)
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

    def split(self, x: str, *sizes: int, axis: int = -1) -> list[str]:
        names = [f"value_{len(self.nodes)}_{i}" for i in range(len(sizes))]
        self.op("Split", x, self.constant(torch.tensor(sizes)), to=names, axis=axis)
        return names

    def linear(self, x: str, linear: nn.Linear | TiedHead) -> str:
        return self.product(x, linear.weight.detach(), linear.bias)

    def product(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """weight: (out, in), in the graph's precision."""
        if self.precision == "groups":
            x = self._grouped(x, weight)
        elif self.precision == "columns":
            x = self._by_column(x, weight.t())
        else:
            x = self.op("MatMul", x, self.matrix(weight.t()))
        return x if bias is None else self.op("Add", x, self.constant(bias))

    def _by_column(self, x: str, matrix: Tensor) -> str:
        scales = _scales(matrix, 0)
        integers = self.matrix((matrix / scales).round_().to(torch.int8))
        return self.op("DynamicQuantizeMatMul", x, integers, self.constant(scales), domain=FUSED)

    def _grouped(self, x: str, weight: Tensor) -> str:
        numbers_out, numbers_in = weight.shape
        groups = F.pad(weight, (0, -numbers_in % GROUP)).unflatten(1, (-1, GROUP))
        scales = _scales(groups, 2)
        integers = (groups / scales.unsqueeze(2)).round_().add_(INT8_ZERO).to(torch.uint8)
        return self.op(
            "MatMulNBits",
            *(x, self.matrix(integers), self.matrix(scales.flatten())),
            domain=FUSED,
            K=numbers_in,
            N=numbers_out,
            bits=8,
            block_size=GROUP,
            accuracy_level=ROUNDED_IN_INT8,
        )

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


def _scales(matrix: Tensor, dim: int) -> Tensor:
    return (matrix.abs().amax(dim=dim) / INT8_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
