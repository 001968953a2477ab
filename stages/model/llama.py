"""Pretrained decoders: Llama's layers with the options in which other families differ from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.architecture import Activation, Experts, LinearScaling, LlamaArchitecture, Matrix, RopeScaling
from stages.model.few_bits import Bfloat16Linear, Int8Embedding, Int8Linear, QuantLinear
from stages.model.layers import CausalLayer, CausalStage, TiedHead, initialise, listed, rotate, seen_keys, soft_capped


# Rounded to float32 as in the code that trained these models: each frequency, and each product with a position. Float64
# is closer to the formula, but further from the model.
def rotary_frequencies(architecture: LlamaArchitecture, slides: bool = False) -> Tensor:
    """Angle by which each pair in a head turns from one position to the next: (head_dim / 2,) float32.

    If only part of a head is rotated, the pairs beyond it do not turn. :param slides: for layers with a window.
    """
    a = architecture
    local = a.window.rope_theta if slides and a.window else None
    theta, scaling = (a.rope_theta, a.rope_scaling) if local is None else (local, None)
    turned = a.rotary_dim or a.head_dim
    frequency = 1 / theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    if isinstance(scaling, LinearScaling):
        frequency = frequency / scaling.factor
    elif scaling is not None:
        frequency = frequency / stretch(frequency, scaling)
    return F.pad(frequency, (0, (a.head_dim - turned) // 2))


def stretch(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's divisor of each frequency: from 1 for fast ones to `factor` for slow ones.

    Source: `apply_scaling` of the Llama 3.1 reference code.
    """
    s = scaling
    turns = s.original_positions * frequency / (2 * math.pi)  # within the model's original training context
    share = (turns - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)
    share = share.clamp(0, 1)
    return 1 / ((1 - share) / s.factor + share)


def llama_rotary(architecture: LlamaArchitecture, slides: bool = False) -> Tensor:
    """cos and sin for `layers.rotate`: (2, positions, head_dim / 2) float32. :param slides: for windowed layers."""
    a = architecture
    if torch.get_default_device().type == "meta":  # as in rotary_table
        return torch.empty(2, a.positions, a.head_dim // 2)
    angle = (torch.arange(a.positions, dtype=torch.float32)[:, None] * rotary_frequencies(a, slides)).double()
    return torch.stack([angle.cos(), angle.sin()]).float()


def _linear(a: LlamaArchitecture, matrix: Matrix, numbers_in: int, numbers_out: int, bias: bool = False) -> nn.Linear:
    """A layer's matrix, in the model's kind of weights."""
    kinds: dict[str, type[nn.Linear]] = {"bfloat16": Bfloat16Linear, "q8": Int8Linear, "q4": QuantLinear}
    return kinds.get(a.weights_of(matrix), nn.Linear)(numbers_in, numbers_out, bias=bias)


class LlamaLayer(CausalLayer):
    """Grouped-query attention and a gated MLP (arXiv 2305.13245, 2002.05202), with an RMSNorm before or after each.

    Rotary embedding in the half-split form: number i of a head is paired with number i + head_dim / 2.
    """

    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    mixture: Mixture | None

    def __init__(self, architecture: LlamaArchitecture, number: int) -> None:
        """number: the layer's index in the whole model."""
        super().__init__()
        a = self.architecture = architecture
        self.window = a.window.size if a.window is not None and a.slides(number) else None
        before, after = a.norms != "after", a.norms != "before"
        self.attention_norm = self._norm(before)
        self.qkv = _linear(a, "qkv", a.width, a.qkv_width, bias=a.attention_bias != "none")
        sizes = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (a.query_width, a.kv_heads * a.head_dim)
        norms = (None if a.qk_norm == "none" else nn.RMSNorm(size, eps=a.norm_epsilon) for size in sizes)
        self.q_norm, self.k_norm = norms
        self.attention_out = _linear(a, "attention_out", a.query_width, a.width, bias=a.attention_bias == "all")
        self.attention_after = self._norm(after)
        self.mlp_norm = self._norm(before)
        self.mixture = None if a.experts is None else Mixture(a, a.experts)
        if a.experts is None:
            self.mlp_in = _linear(a, "mlp_in", a.width, 2 * a.mlp_width)  # the gate's rows, then those it multiplies
            self.mlp_out = _linear(a, "mlp_out", a.mlp_width, a.width)
        self.mlp_after = self._norm(after)

    def _norm(self, is_present: bool) -> nn.RMSNorm | nn.Identity:
        return nn.RMSNorm(self.architecture.width, eps=self.architecture.norm_epsilon) if is_present else nn.Identity()

    def by_head(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.architecture
        keys = a.kv_heads * a.head_dim
        q, k, v = qkv.split([a.query_width, keys, keys], dim=2)
        if a.qk_norm == "projection" and self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(2, (-1, a.head_dim)).transpose(1, 2) for x in (q, k, v))
        if a.qk_norm == "head" and self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotary), rotate(k, rotary), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
        a = self.architecture
        if a.query_scalar is None and a.attention_softcap is None and self.window is None:
            return super().attend(q, k, v, past)
        seen = seen_keys(q.shape[2], past, self.window, q.device)
        if a.attention_softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=a.query_scale, enable_gqa=True)
        grouped = q.unflatten(1, (a.kv_heads, -1)) * a.query_scale
        scores = soft_capped(grouped @ k.unsqueeze(2).transpose(3, 4), a.attention_softcap)
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)

    def out_of_heads(self, mixed: Tensor) -> Tensor:
        return self.attention_after(self.attention_out(mixed))

    def mlp(self, x: Tensor) -> Tensor:
        read = self.mlp_norm(x)
        if self.mixture is not None:
            written = self.mixture(read)
        else:
            written = self.mlp_out(gated(self.mlp_in(read), self.architecture.activation))
        return self.mlp_after(written)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gated(hidden: Tensor, activation: Activation) -> Tensor:
    """Apply a gate to the numbers next to it: (..., 2 n) -> (..., n)."""
    gate, up = hidden.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


class Mixture(nn.Module):
    """A mixture of gated MLPs, of which each position uses a few (arXiv 2401.04088)."""

    def __init__(self, architecture: LlamaArchitecture, experts: Experts) -> None:
        super().__init__()
        a, self.used, self.normalised = architecture, experts.used, experts.normalised
        self.activation = a.activation
        self.router = nn.Linear(a.width, experts.count, bias=False)
        self.experts = listed(Expert(a) for _ in range(experts.count))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the experts that a position uses, and their indices: (rows, used) each. scores: (rows, count)."""
        weights, chosen = scores.softmax(-1).topk(self.used, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self.normalised else weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width)."""
        rows = x.flatten(0, -2)
        weights, chosen = self.choose(self.router(rows))
        result = torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            at, place = (chosen == number).nonzero(as_tuple=True)
            expert = self.experts[number]
            written = expert.mlp_out(gated(expert.mlp_in(rows[at]), self.activation))
            result = result.index_add(0, at, written * weights[at, place, None])
        return result.view(x.shape)


class Expert(nn.Module):
    """The two matrices of a gated MLP."""

    def __init__(self, architecture: LlamaArchitecture) -> None:
        super().__init__()
        a = architecture
        self.mlp_in = _linear(a, "mlp_in", a.width, 2 * a.mlp_width)  # as in LlamaLayer
        self.mlp_out = _linear(a, "mlp_out", a.mlp_width, a.width)


class LlamaStage(CausalStage):
    """One stage of a pretrained model."""

    layers: Sequence[LlamaLayer]
    sliding_rotary: Tensor  # for layers with a window

    def __init__(self, architecture: LlamaArchitecture, index: int) -> None:
        super().__init__(index, architecture.parts)
        self.architecture = a = architecture
        kind = Int8Embedding if a.is_grouped else nn.Embedding
        self.embedding = kind(a.vocabulary, a.width) if self.is_first else None
        begin = sum(a.layers[:index])
        self.layers = listed(LlamaLayer(a, begin + i) for i in range(a.layers_in(index)))
        self.norm = nn.RMSNorm(a.width, eps=a.norm_epsilon) if self.is_last else None
        self.head = None
        if self.is_last and a.tied_head and isinstance(self.embedding, nn.Embedding):
            self.head = TiedHead(self.embedding)
        elif self.is_last:
            self.head = (Int8Linear if a.is_grouped else nn.Linear)(a.width, a.vocabulary, bias=False)
        self.restore_tables()
        initialise(self, a.total_layers)

    def rotary_of(self, layer: int) -> Tensor:
        slides = self.layers[layer].window is not None
        return self.sliding_rotary if slides and hasattr(self, "sliding_rotary") else self.rotary

    def next_byte(self, hidden: Tensor) -> Tensor:
        return soft_capped(super().next_byte(hidden), self.architecture.logit_softcap)

    def restore_tables(self) -> None:
        """Compute the tables, which are not stored; again for a stage that was built on the meta device."""
        a = self.architecture
        self.register_buffer("rotary", llama_rotary(a), persistent=False)
        if a.window is not None and a.window.rope_theta is not None:
            self.register_buffer("sliding_rotary", llama_rotary(a, slides=True), persistent=False)
