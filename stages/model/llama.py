"""The shape of a pretrained model of the Llama family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onesweep.stages.errors import ShapeError
from onesweep.stages.model.architecture import check_whole
from onesweep.stages.model.layers import CausalLayer, CausalStage, TiedHead, initialise, rotate

# Which of attention's products have a bias: none (Llama), queries, keys and values (Qwen 2), the output's too.
Bias = Literal["none", "qkv", "all"]

MAX_LAYERS = 1024
_BOUNDS = {
    "width": (2, 1 << 16),
    "heads": (1, 1 << 12),
    "kv_heads": (1, 1 << 12),
    "head_dim": (2, 1 << 12),
    "mlp_width": (1, 1 << 20),
    "positions": (2, 1 << 22),
    "vocabulary": (2, 1 << 22),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's longer rotary wavelengths (`rope_type` llama3): those past the original context are stretched by
    `factor`, those well within it are left alone, and what is between goes over smoothly."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_frequency_factor", "high_frequency_factor"):
            _check_number(f"rope_scaling.{name}", getattr(self, name), 0.01, 1e4)
        check_whole("rope_scaling.original_positions", self.original_positions, 2, 1 << 22)
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ShapeError(
                f"architecture: rope_scaling.low_frequency_factor {self.low_frequency_factor} must be below "
                f"high_frequency_factor {self.high_frequency_factor}"
            )


@dataclass(frozen=True)
class LlamaArchitecture:
    """Sizes of a model of RMSNorm, grouped-query attention with rotary embedding, and SwiGLU, cut into stages.

    Raises ShapeError for what cannot be. Where the head is `tied` to the embedding, a lone stage stores
    that matrix once; of several stages the last has a copy of it, for a host holds its own stage only.
    """

    layers: tuple[int, ...]  # transformer layers of each stage: stages are cut by cost, the head's too
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    positions: int
    vocabulary: int
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    attention_bias: Bias = "none"
    family: Literal["llama"] = "llama"

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            check_whole(name, getattr(self, name), least, most)
        if not isinstance(self.layers, tuple) or not self.layers:
            raise ShapeError(f"architecture: layers must list the layers of each stage, not {self.layers!r}")
        for count in self.layers:
            check_whole("layers of a stage", count, 1, MAX_LAYERS)
        if sum(self.layers) > MAX_LAYERS:
            raise ShapeError(f"architecture: {sum(self.layers)} layers; at most {MAX_LAYERS} are read")
        if self.heads % self.kv_heads:
            raise ShapeError(f"architecture: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ShapeError(f"architecture: head_dim {self.head_dim} must be even (rotary pairs)")
        _check_number("norm_epsilon", self.norm_epsilon, 1e-12, 0.1)
        _check_number("rope_theta", self.rope_theta, 1.0, 1e12)
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ShapeError(f"architecture: rope_scaling must be Llama 3's or none, not {self.rope_scaling!r}")
        if type(self.tied_head) is not bool:
            raise ShapeError(f"architecture: tied_head must be true or false, not {self.tied_head!r}")
        if self.attention_bias not in get_args(Bias):
            raise ShapeError(
                f"architecture: attention_bias must be one of {', '.join(get_args(Bias))}, not {self.attention_bias!r}"
            )
        if self.family != "llama":
            raise ShapeError(f"architecture: family {self.family!r} is unknown; this version has 'llama'")

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> LlamaArchitecture:
        """Architecture of a manifest's JSON object. Raises ShapeError or TypeError."""
        fields = dict(record)
        layers, scaling = fields.get("layers"), fields.get("rope_scaling")
        fields["layers"] = tuple(layers) if isinstance(layers, list) else layers
        if scaling is not None:
            fields["rope_scaling"] = RopeScaling(**scaling)
        return LlamaArchitecture(**fields)

    @property
    def parts(self) -> int:
        return len(self.layers)

    @property
    def query_width(self) -> int:
        """Numbers in the queries of a position: not always the model's width."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Numbers in queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def layers_in(self, part: int) -> int:
        """Transformer layers of one stage."""
        return self.layers[part]


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type,operator]
        raise ShapeError(f"architecture: {name} must be a number from {least:g} to {most:g}, not {value!r}")


# Rotary angles of pretrained models.


# Rounded to float32 as in the code that trained these models, each frequency and each product with a position. Float64
# is nearer to the formula and further from the model: 4,000 positions on a logit of SmolLM2-135M was off by 1.1e-3 and
# is by 9.1e-5.
def rotary_frequencies(architecture: LlamaArchitecture) -> Tensor:
    """Angle by which each pair of a head turns from one position to the next: (head_dim / 2,) float32.

    In float32, step by step as in the code that such models are trained with: over thousands of positions, what is
    rounded here adds up to more than all other rounding.
    """
    a = architecture
    frequency = 1 / a.rope_theta ** (torch.arange(0, a.head_dim, 2, dtype=torch.float32) / a.head_dim)
    return frequency if a.rope_scaling is None else frequency / stretch(frequency, a.rope_scaling)


def stretch(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """By what Llama 3 divides each frequency: from 1 for fast ones to `factor` for slow ones.

    Source: `apply_scaling` of the Llama 3.1 reference code.
    """
    s = scaling
    turns = s.original_positions * frequency / (2 * math.pi)  # within the context that the model was first trained for
    share = (turns - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)
    share = share.clamp(0, 1)
    return 1 / ((1 - share) / s.factor + share)


def llama_rotary(architecture: LlamaArchitecture) -> Tensor:
    """cos and sin for `layers.rotate`: (2, positions, head_dim / 2) float32."""
    a = architecture
    if torch.get_default_device().type == "meta":  # as in rotary_table
        return torch.empty(2, a.positions, a.head_dim // 2)
    angle = (torch.arange(a.positions, dtype=torch.float32)[:, None] * rotary_frequencies(a)).double()
    return torch.stack([angle.cos(), angle.sin()]).float()


# Layers of the Llama family and a stage of them: what the backends compute, in its plainest form.
class LlamaLayer(CausalLayer):
    """Grouped-query attention and SwiGLU (arXiv 2305.13245, 2002.05202), each behind an RMSNorm.

    Rotary embedding in the half-split form: number i of a head is paired with number i + head_dim / 2.
    """

    def __init__(self, architecture: LlamaArchitecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.attention_norm = nn.RMSNorm(a.width, eps=a.norm_epsilon)
        self.qkv = nn.Linear(a.width, a.qkv_width, bias=a.attention_bias != "none")
        self.attention_out = nn.Linear(a.query_width, a.width, bias=a.attention_bias == "all")
        self.mlp_norm = nn.RMSNorm(a.width, eps=a.norm_epsilon)
        self.mlp_in = nn.Linear(a.width, 2 * a.mlp_width, bias=False)  # the gate's rows, then those it multiplies
        self.mlp_out = nn.Linear(a.mlp_width, a.width, bias=False)

    def by_head(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.architecture
        by_head = qkv.unflatten(2, (-1, a.head_dim)).transpose(1, 2)
        q, k, v = by_head.split([a.heads, a.kv_heads, a.kv_heads], dim=1)
        return rotate(q, rotary), rotate(k, rotary), v

    def activate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up


class LlamaStage(CausalStage):
    """One stage of a model of tokens."""

    layers: Sequence[LlamaLayer]

    def __init__(self, architecture: LlamaArchitecture, index: int) -> None:
        super().__init__()
        a = architecture
        self.architecture, self.index = a, index
        self.is_first, self.is_last = index == 0, index == a.parts - 1
        self.embedding = nn.Embedding(a.vocabulary, a.width) if self.is_first else None
        self.layers = cast(Sequence[LlamaLayer], nn.ModuleList(LlamaLayer(a) for _ in range(a.layers_in(index))))
        self.norm = nn.RMSNorm(a.width, eps=a.norm_epsilon) if self.is_last else None
        self.head = self._new_head() if self.is_last else None
        self.register_buffer("rotary", llama_rotary(a), persistent=False)
        initialise(self, sum(a.layers))

    def _new_head(self) -> nn.Linear | TiedHead:
        a = self.architecture
        if a.tied_head and self.embedding is not None:
            return TiedHead(self.embedding)
        return nn.Linear(a.width, a.vocabulary, bias=False)

    def restore_tables(self) -> None:
        """Compute what is not stored, for a stage that was built on the meta device."""
        self.rotary = llama_rotary(self.architecture)
