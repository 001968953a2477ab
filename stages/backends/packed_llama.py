"""Stages of pretrained models on packed rows."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from stages.backends.packed import (
    Angles,
    PackedNorm,
    PackedReader,
    PackedStage,
    PipelineLayer,
    PipelineRunner,
    normed_head,
)
from stages.backends.rows import PRODUCT_THREADS, Rows, in_slabs
from stages.errors import CheckpointError
from stages.model.architecture import LlamaArchitecture
from stages.model.few_bits import MAX_HALF, Bfloat16Linear, GroupedLinear
from stages.model.layers import TiedHead
from stages.model.llama import ACTIVATIONS, Expert, LlamaLayer, LlamaStage, Mixture
from stages.model.pipeline import PipelineStage

# FBGEMM's rows are batch-invariant with up to 7 threads, but not with 8, 9, 11, 12 or 16 (SmolLM2).
HALF_THREADS = 4


class HalfProduct:
    """x @ weight.T + bias of 16-bit weights, by FBGEMM. x, sums and results are float32, so one row adds up as many do.
    It takes over the linear layer's weight, which is empty afterwards; a tied head's weight stays. A later torch may
    lack the operators, so its version is exact.

    A bfloat16 weight is exact in float16 unless it is below 2^-17; then it is rounded by at most 2^-25.
    """

    def __init__(self, linear: nn.Linear | TiedHead) -> None:
        weight = linear.weight.detach().float()
        if not weight.abs().max() <= MAX_HALF:
            raise CheckpointError("a matrix holds values beyond 65504: import the model with --weights float32")
        self.bias = None if linear.bias is None else linear.bias.detach()
        try:
            with warnings.catch_warnings():
                # torch warns once that both are deprecated. `torch.ops.quantized` has both, but its calls take 8 us.
                warnings.simplefilter("ignore", UserWarning)
                self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
                self(weight.new_zeros(1, weight.shape[1]))
        except RuntimeError:  # torch has no kernels for this processor
            raise CheckpointError(
                "this processor has no 16-bit matrix products: import the model with --weights float32"
            ) from None
        if isinstance(linear, nn.Linear):
            linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in) -> (rows, out)."""
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)


def product(linear: nn.Linear | TiedHead) -> Callable[[Tensor], Tensor]:
    """x @ weight.T + bias, (rows, in) -> (rows, out). On the processor it takes over the linear layer's weights."""
    if isinstance(linear, Bfloat16Linear):
        return HalfProduct(linear)
    if isinstance(linear, GroupedLinear) or linear.weight.is_cpu:
        from stages.backends.onnx import OnnxProduct

        return OnnxProduct(linear)
    return partial(in_slabs, linear)


class PackedLlamaLayer(PipelineLayer):
    """Rows of several pieces through one layer."""

    def __init__(self, layer: LlamaLayer) -> None:
        a = layer.architecture
        norms = (layer.attention_norm, layer.attention_after, layer.mlp_norm, layer.mlp_after)
        self.attention_norm, self.attention_after, self.mlp_norm, self.mlp_after = (
            norm if isinstance(norm, nn.Identity) else PackedNorm(norm) for norm in norms
        )
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


class QueryKeyNorm:
    """RMSNorm of queries and of keys, over each head or over all together."""

    def __init__(self, layer: LlamaLayer) -> None:
        a = layer.architecture
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        self.norms = (PackedNorm(layer.q_norm), PackedNorm(layer.k_norm))
        self.sizes = (a.query_width, a.kv_heads * a.head_dim)
        self.groups = (a.head_dim, a.head_dim) if a.qk_norm == "head" else self.sizes

    def __call__(self, qkv: Tensor) -> None:
        """Normalize in place. qkv: (rows, qkv_width)."""
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
    """A mixture of experts: each expert computes the rows that chose it, padded as if they were a separate pass, so no
    row depends on which other rows chose it."""

    def __init__(self, mixture: Mixture, architecture: LlamaArchitecture) -> None:
        self.mixture, self.hidden, self.threads = mixture, architecture.mlp_width, PRODUCT_THREADS.get()
        self.router = product(mixture.router)
        self.experts = [PackedMlp(expert, architecture) for expert in mixture.experts]

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, width), normed."""
        weights, chosen = self.mixture.choose(self.router(x))
        written = x.new_empty(*chosen.shape, x.shape[1])
        for number in chosen.unique().tolist():
            at, place = (chosen == number).nonzero(as_tuple=True)
            rows = Rows.of([len(at)], self.hidden, self.threads, least=1, is_cpu=x.is_cpu)
            written[at, place] = rows.unpack(self.experts[number](rows.pack([x[at]])))[0]
        # one by one, best first: a sum in another order would round differently
        result = written[:, 0] * weights[:, :1]
        for place in range(1, chosen.shape[1]):
            result.addcmul_(written[:, place], weights[:, place : place + 1])
        return result


class LlamaReader(PackedReader):
    """The clean stream of a stage of a pretrained model."""

    def __init__(self, stage: LlamaStage) -> None:
        self.architecture = a = stage.architecture
        super().__init__(stage, [PackedLlamaLayer(layer) for layer in stage.layers], a.mlp_width, least=1)

    def spread(self, factors: Tensor) -> Angles:
        cos, sin = (_by_rotated_head(each, self.architecture) for each in factors.unbind(1))
        return cos, sin


def packed_stage(stage: PipelineStage) -> PipelineRunner:
    """The runner of a stage of any family. It takes the stage's matrices over: each is freed when it is laid out anew,
    so that memory stays near one stage."""
    of_torch = isinstance(stage, LlamaStage) and (
        stage.architecture.experts or stage.architecture.weights == "bfloat16"
    )
    if of_torch or not stage.rotary.is_cpu:
        return torch_stage(stage)
    from stages.backends.onnx import onnx_stage  # importing takes a third of a second, and other parts do not need it

    return onnx_stage(stage)


def torch_stage(stage: PipelineStage) -> PipelineRunner:
    """The runner of a stage on another device than the processor, and of stages that no graph computes."""
    if not isinstance(stage, LlamaStage):
        return PackedStage(stage)
    in_halves = stage.architecture.weights == "bfloat16"  # 16-bit products are torch's
    head = None if stage.head is None else (HalfProduct if in_halves else product)(stage.head)
    reader = LlamaReader(stage)
    return PipelineRunner(reader, normed_head(stage, head), min(reader.threads, HALF_THREADS) if in_halves else 1)


def _by_rotated_head(factors: Tensor, a: LlamaArchitecture) -> Tensor:
    """(rows, 2, 1, 2, half) from `LayerKind.factors`, for queries and keys -> (rows, heads + kv_heads, 2, half)."""
    queries, keys = factors.squeeze(2).unbind(1)
    return torch.cat(
        [queries.unsqueeze(1).expand(-1, a.heads, -1, -1), keys.unsqueeze(1).expand(-1, a.kv_heads, -1, -1)], dim=1
    )
