"""Stages of pretrained models on packed rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.packed import (
    Angles,
    PackedNorm,
    PackedReader,
    PackedStage,
    PipelineLayer,
    PipelineRunner,
    normed_head,
)
from stages.backends.rows import Rows, in_slabs
from stages.errors import CheckpointError
from stages.memory import give_back, is_owned
from stages.model.architecture import LlamaArchitecture
from stages.model.layers import GroupedLinear, TiedHead
from stages.model.llama import ACTIVATIONS, Expert, LlamaLayer, LlamaStage, Mixture
from stages.model.pipeline import PipelineStage

_ONEDNN: Any = torch.ops.mkldnn
# oneDNN has a kernel of its own for one row, which adds in another order; from here on a row's result is the same in
# any company, and this many rows take no longer than one: what is waited for is the matrix.
FEWEST_ROWS = 4
# Four rows were enough on AMD's processors and not on Intel's, where `ar-speculative` then wrote another text than
# `ar`; so the number is measured at every load (runner_checks.py).
USUAL_ROWS = 16  # what the layout is chosen for
# oneDNN compiles a kernel for every shape and number of rows, and keeps it: 0.6 MB each, 2.4 for a model's four shapes.
# So there are 16 numbers of rows: more than 128 go in slabs, within 5 % of the time of one product of all of them.
PRODUCT_ROWS = 128
# A larger matrix is laid out in blocks of rows, each of which is given back then. The head of SmolLM2 is 113 of its
# stage's 184 MB: laid out whole it is there twice for a moment, 1.76 of the file, and in blocks 1.36.
BLOCK_BYTES = 32 << 20


# torch's plain product takes several times as long for four to sixteen rows as for one on some processors, and promises
# nothing about last bits. In oneDNN's blocked layout four rows cost what one costs.
class Product:
    """x @ weight.T + bias, with the weight in oneDNN's blocked layout: read in order, it is there in fewer accesses.
    With a weight in bfloat16 x and the product are rounded to it, sums are not.

    Takes the linear layer's weight over, which is empty afterwards; that of a tied head stays, for the embedding reads
    it. The operators have no public name in torch, so its version is exact. On other devices the weight stays as it is.
    """

    is_packed = torch.backends.mkldnn.is_available()

    def __init__(self, linear: nn.Linear | TiedHead) -> None:
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        if isinstance(linear, nn.Linear):
            linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.is_packed = self.is_packed and weight.is_cpu
        self.type = weight.dtype
        if self.type is torch.bfloat16 and not (self.is_packed and _ONEDNN._is_mkldnn_bf16_supported()):
            raise CheckpointError("this processor has no products in bfloat16: import the model with --weights float32")
        count = max(1, BLOCK_BYTES // (weight.itemsize * weight.shape[1])) if self.is_packed else len(weight)
        starts = range(0, len(weight), count)
        self.biases = [None if bias is None else bias[start : start + count] for start in starts]
        owned = self.is_packed and is_owned(weight)
        self.blocks = list[Tensor]()
        for start in starts:
            block = weight[start : start + count]
            self.blocks.append(_ONEDNN._reorder_linear_weight(block, USUAL_ROWS) if self.is_packed else block)
            if owned and len(starts) > 1:
                give_back(block)

    @staticmethod
    def rows(counts: Sequence[int], hidden: int) -> Rows:
        """Rows such that the result of each depends on no other. hidden: numbers in a row of the widest layer."""
        last = sum(counts) % PRODUCT_ROWS
        times = 1 if last <= PRODUCT_ROWS // 4 else 2 if last <= PRODUCT_ROWS // 2 else 4
        return Rows.of(counts, hidden, times * FEWEST_ROWS if Product.is_packed else 0)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in) -> (rows, out)."""
        if self.is_packed and len(x) > PRODUCT_ROWS:
            return torch.cat([self(slab) for slab in x.split(PRODUCT_ROWS)])
        results = [self._product(x, *each) for each in zip(self.blocks, self.biases, strict=True)]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.type is torch.bfloat16:
            rounded: Tensor = _ONEDNN._linear_pointwise(x.bfloat16(), weight, None, "none", [], "").float()
            return rounded if bias is None else rounded.add_(bias)
        if self.is_packed:
            result: Tensor = _ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
            return result
        return F.linear(x, weight, bias) if x.is_cpu else in_slabs(lambda slab: F.linear(slab, weight, bias), x)


def product(linear: nn.Linear | TiedHead) -> Callable[[Tensor], Tensor]:
    """x @ weight.T + bias, (rows, in) -> (rows, out). Takes the linear layer's numbers over."""
    if isinstance(linear, GroupedLinear):
        from stages.backends.onnx import FewBitsProduct

        return FewBitsProduct(linear)
    return Product(linear)


class PackedLlamaLayer(PipelineLayer):
    """Rows of several pieces through one layer."""

    def __init__(self, layer: LlamaLayer) -> None:
        a = layer.architecture
        norms = (layer.attention_norm, layer.attention_after, layer.mlp_norm, layer.mlp_after)
        self.attention_norm, self.attention_after, self.mlp_norm, self.mlp_after = map(_packed_norm, norms)
        self.qkv, self.attention_out = product(layer.qkv), product(layer.attention_out)
        self.qk_norm = None if layer.q_norm is None else QueryKeyNorm(layer)
        self.mlp = PackedMlp(layer, a) if layer.mixture is None else PackedMixture(layer.mixture, a)

    def project(self, x: Tensor, angles: Angles) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        if self.qk_norm is not None:
            self.qk_norm(qkv)
        cos, sin = angles
        both = qkv[:, : cos.shape[1] * cos.shape[2] * cos.shape[3]].view(cos.shape)
        swapped = both.roll(1, 2)
        both.mul_(cos).addcmul_(swapped, sin)
        return qkv

    def finish(self, x: Tensor, mixed: Tensor) -> None:
        x.add_(self.attention_after(self.attention_out(mixed)))
        x.add_(self.mlp_after(self.mlp(self.mlp_norm(x))))


def _packed_norm(norm: nn.RMSNorm | nn.Identity) -> PackedNorm | nn.Identity:
    return norm if isinstance(norm, nn.Identity) else PackedNorm(norm)


class QueryKeyNorm:
    """RMSNorm of queries and of keys, of each head or of all together."""

    def __init__(self, layer: LlamaLayer) -> None:
        a = layer.architecture
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        self.norms = (PackedNorm(layer.q_norm), PackedNorm(layer.k_norm))
        self.sizes = (a.query_width, a.kv_heads * a.head_dim)
        self.groups = (a.head_dim, a.head_dim) if a.qk_norm == "head" else self.sizes

    def __call__(self, qkv: Tensor) -> None:
        """In place. qkv: (rows, qkv_width)."""
        begin = 0
        for norm, size, group in zip(self.norms, self.sizes, self.groups, strict=True):
            numbers = qkv.narrow(1, begin, size).unflatten(1, (-1, group))
            numbers.copy_(norm(numbers))
            begin += size


class PackedMlp:
    """The gated MLP of a layer, or of an expert."""

    def __init__(self, matrices: LlamaLayer | Expert, architecture: LlamaArchitecture) -> None:
        self.mlp_in, self.mlp_out = product(matrices.mlp_in), product(matrices.mlp_out)
        self.activation = ACTIVATIONS[architecture.activation]

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, width), normed."""
        gate, up = self.mlp_in(x).chunk(2, dim=1)
        return self.mlp_out(self.activation(gate).mul_(up))


class PackedMixture:
    """A mixture of experts: each computes the rows that chose it, padded as if they were a pass of their own, so that
    no row depends on which others did."""

    def __init__(self, mixture: Mixture, architecture: LlamaArchitecture) -> None:
        self.mixture, self.hidden = mixture, architecture.mlp_width
        self.router = product(mixture.router)
        self.experts = [PackedMlp(expert, architecture) for expert in mixture.experts]

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, width), normed."""
        weights, chosen = self.mixture.choose(self.router(x))
        written = x.new_empty(*chosen.shape, x.shape[1])
        for number in chosen.unique().tolist():
            at, place = (chosen == number).nonzero(as_tuple=True)
            rows = Product.rows([len(at)], self.hidden) if x.is_cpu else Rows.in_slabs([len(at)])
            written[at, place] = rows.unpack(self.experts[number](rows.pack([x[at]])))[0]
        # one after the other, best first: a sum in another order would round otherwise
        result = written[:, 0] * weights[:, :1]
        for place in range(1, chosen.shape[1]):
            result.addcmul_(written[:, place], weights[:, place : place + 1])
        return result


class LlamaReader(PackedReader):
    """The tokens' way through a stage."""

    def __init__(self, stage: LlamaStage) -> None:
        self.architecture = a = stage.architecture
        super().__init__(stage, [PackedLlamaLayer(layer) for layer in stage.layers], a.mlp_width)

    def rows_of(self, counts: Sequence[int]) -> Rows:
        return Product.rows(counts, self.hidden) if self.device.type == "cpu" else Rows.in_slabs(counts)

    def spread(self, factors: Tensor) -> Angles:
        cos, sin = (_by_rotated_head(each, self.architecture) for each in factors.unbind(1))
        return cos, sin


def packed_stage(stage: PipelineStage) -> PipelineRunner:
    """The runner of a stage of any family. It takes a pretrained stage's matrices over: each is freed when it is laid
    out anew, so that memory stays near one stage."""
    if not isinstance(stage, LlamaStage):
        return PackedStage(stage)
    if isinstance(stage.layers[0].qkv, GroupedLinear) and stage.architecture.experts is None:
        from stages.backends.onnx import OnnxStage  # a third of a second to import, which other models do not need

        return OnnxStage(stage)
    return PipelineRunner(LlamaReader(stage), normed_head(stage, None if stage.head is None else product(stage.head)))


def _by_rotated_head(factors: Tensor, a: LlamaArchitecture) -> Tensor:
    """(rows, 2, 1, 2, half) of `LayerKind.factors`, for queries and for keys -> (rows, heads + kv_heads, 2, half)."""
    queries, keys = factors.squeeze(2).unbind(1)
    return torch.cat(
        [queries.unsqueeze(1).expand(-1, a.heads, -1, -1), keys.unsqueeze(1).expand(-1, a.kv_heads, -1, -1)], dim=1
    )
