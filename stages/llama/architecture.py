"""The shape of a pretrained model of the Llama family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from stages.errors import ShapeError

Bias = Literal["none", "qkv", "all"]
"""Which of attention's products have a bias: none (Llama), queries, keys and values (Qwen 2), the output's too."""

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
        _check_whole("rope_scaling.original_positions", self.original_positions, 2, 1 << 22)
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

    layers: tuple[int, ...]
    """Transformer layers of each stage: stages are cut by cost, the head's too."""
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
            _check_whole(name, getattr(self, name), least, most)
        if not isinstance(self.layers, tuple) or not self.layers:
            raise ShapeError(f"architecture: layers must list the layers of each stage, not {self.layers!r}")
        for count in self.layers:
            _check_whole("layers of a stage", count, 1, MAX_LAYERS)
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
        """Of a manifest's JSON object. Raises ShapeError or TypeError."""
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


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ShapeError(f"architecture: {name} must be a whole number from {least} to {most}, not {value!r}")


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type,operator]
        raise ShapeError(f"architecture: {name} must be a number from {least:g} to {most:g}, not {value!r}")
