"""Shapes of models: of those that are trained here, chains of diffusion blocks and AR pipelines, and of pretrained
decoders, Llama's with the options in which other families differ from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

from stages.errors import ShapeError

# Of a model of bytes. There is no padding and no start token: a prompt has at least one token.
VOCABULARY = 256
MAX_LAYERS = 1024  # every layer is built before its tensors are compared with their file: that takes time

CONTEXT = "own"  # what a block's clean stream reads, in manifests: the text. There is no other.


@dataclass(frozen=True)
class Architecture:
    """Sizes shared by every block of a chain, or every stage of an AR pipeline.

    `parts` counts blocks (chain) or stages (AR); `layers` counts transformer layers in *one* part.
    """

    parts: int = 3
    layers: int = 2
    width: int = 128
    heads: int = 4
    context_length: int = 512
    code_dim: int = 32
    condition_dim: int = 64
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        for name in ("parts", "layers", "width", "heads", "context_length", "code_dim", "condition_dim", "vocabulary"):
            least = 2 if name in ("context_length", "vocabulary") else 1  # one alone has no next one to learn from
            # a place in a row takes 16 bits on the wire
            most = {"width": 1 << 16, "layers": MAX_LAYERS}.get(name, 1 << 20)
            check_whole(name, getattr(self, name), least, most)
        if self.parts * self.layers > MAX_LAYERS:
            raise ShapeError(f"architecture: {self.parts * self.layers} layers; at most {MAX_LAYERS} are read")
        if self.width % (2 * self.heads):
            raise ShapeError(
                f"architecture: width {self.width} must be an even multiple of heads {self.heads} (rotary pairs)"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: each query head has its own."""
        return self.heads

    @cached_property
    def positions(self) -> int:
        """Tokens in a context."""
        return self.context_length

    def layers_in(self, part: int) -> int:
        """Transformer layers of one part: of all the same number."""
        return self.layers


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise ShapeError unless a size is a whole number within these bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ShapeError(f"architecture: {name} must be a whole number from {least} to {most}, not {value!r}")


# Which of attention's products have a bias: none (Llama), queries, keys and values (Qwen 2), the output's too.
Bias = Literal["none", "qkv", "all"]
# RMSNorm of queries and keys before they are rotated: none, of each head (Qwen 3), of all heads together (OLMo 2).
QkNorm = Literal["none", "head", "projection"]
# RMSNorm of what attention and the MLP read (Llama), of what they write (OLMo 2), or of both (Gemma).
Norms = Literal["before", "after", "both"]
Activation = Literal["silu", "gelu_tanh"]  # of the MLP's gate; gelu in the form with a tanh
Matrix = Literal["qkv", "attention_out", "mlp_in", "mlp_out"]  # of a layer, or of each of its experts
# Of the matrices in layers: numbers of 4 bytes, of 2, of 8 bits with a scale for 32 of them, or of 4 bits with a scale
# and an offset for 32. With either, the embedding and the head are of 8 bits.
Weights = Literal["float32", "bfloat16", "q8", "q4"]
WEIGHT_WORDS: dict[str, str] = {
    "bfloat16": "weights in bfloat16",
    "q8": "weights of 8 bits",
    "q4": "weights of 4 bits",
}

MAX_POSITIONS = 1 << 22
MAX_EXPERTS = 1 << 15  # in all layers together
GROUP = 32  # weights of 4 or 8 bits that share a scale


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
            check_number(f"rope_scaling.{name}", getattr(self, name), 0.01, 1e4)
        check_whole("rope_scaling.original_positions", self.original_positions, 2, MAX_POSITIONS)
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ShapeError(
                f"architecture: rope_scaling.low_frequency_factor {self.low_frequency_factor} must be below "
                f"high_frequency_factor {self.high_frequency_factor}"
            )


@dataclass(frozen=True)
class LinearScaling:
    """All rotary wavelengths stretched by `factor` (`rope_type` linear)."""

    factor: float

    def __post_init__(self) -> None:
        check_number("rope_scaling.factor", self.factor, 0.01, 1e4)


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding attention: in these layers a position sees itself and the `size` - 1 before it."""

    size: int
    layers: tuple[int, ...]  # their numbers in the whole model, in order
    rope_theta: float | None = None  # theirs, unscaled, where it is not the model's

    def __post_init__(self) -> None:
        check_whole("window.size", self.size, 1, MAX_POSITIONS)
        if not isinstance(self.layers, tuple) or not self.layers:
            raise ShapeError(f"architecture: window.layers must list the layers that slide, not {self.layers!r}")
        for number in self.layers:
            check_whole("window.layers", number, 0, MAX_LAYERS - 1)
        if list(self.layers) != sorted(set(self.layers)):
            raise ShapeError("architecture: window.layers must name each layer once, in order")
        if self.rope_theta is not None:
            check_number("window.rope_theta", self.rope_theta, 1.0, 1e12)


@dataclass(frozen=True)
class Experts:
    """A mixture of MLPs: a router chooses `used` of `count` for each position, and adds them up by its weights."""

    count: int
    used: int
    normalised: bool  # the weights of those that are used add up to one

    def __post_init__(self) -> None:
        check_whole("experts.count", self.count, 2, MAX_EXPERTS)
        check_whole("experts.used", self.used, 1, self.count)
        if type(self.normalised) is not bool:
            raise ShapeError(f"architecture: experts.normalised must be true or false, not {self.normalised!r}")


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raises ShapeError for what is no number from `least` to `most`."""
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type,operator]
        raise ShapeError(f"architecture: {name} must be a number from {least:g} to {most:g}, not {value!r}")


_BOUNDS = {
    "width": (2, 1 << 16),
    "heads": (1, 1 << 12),
    "kv_heads": (1, 1 << 12),
    "head_dim": (2, 1 << 12),
    "mlp_width": (1, 1 << 20),
    "positions": (2, MAX_POSITIONS),
    "vocabulary": (2, 1 << 22),
}
_CHOICES = {"attention_bias": Bias, "qk_norm": QkNorm, "norms": Norms, "activation": Activation, "weights": Weights}


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
    mlp_width: int  # of each expert, where there are several
    positions: int
    vocabulary: int
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | LinearScaling | None = None
    tied_head: bool = False
    attention_bias: Bias = "none"
    family: Literal["llama"] = "llama"
    # Options that Llama does without. A manifest has those that are not as here: see `drop_defaults`.
    qk_norm: QkNorm = "none"
    norms: Norms = "before"
    activation: Activation = "silu"
    rotary_dim: int | None = None  # numbers of a head that are rotated; None for all
    query_scalar: float | None = None  # attention's scores are divided by its root; None for head_dim
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    window: SlidingWindow | None = None
    experts: Experts | None = None
    weights: Weights = "float32"
    eight_bits: tuple[Matrix, ...] = ()  # those that have 8 bits where the weights have 4

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            check_whole(name, getattr(self, name), least, most)
        if not isinstance(self.layers, tuple) or not self.layers:
            raise ShapeError(f"architecture: layers must list the layers of each stage, not {self.layers!r}")
        for count in self.layers:
            check_whole("layers of a stage", count, 1, MAX_LAYERS)
        if self.total_layers > MAX_LAYERS:
            raise ShapeError(f"architecture: {self.total_layers} layers; at most {MAX_LAYERS} are read")
        if self.heads % self.kv_heads:
            raise ShapeError(f"architecture: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ShapeError(f"architecture: head_dim {self.head_dim} must be even (rotary pairs)")
        check_number("norm_epsilon", self.norm_epsilon, 1e-12, 0.1)
        check_number("rope_theta", self.rope_theta, 1.0, 1e12)
        if type(self.tied_head) is not bool:
            raise ShapeError(f"architecture: tied_head must be true or false, not {self.tied_head!r}")
        for name, kind in _CHOICES.items():
            if (value := getattr(self, name)) not in get_args(kind):
                raise ShapeError(f"architecture: {name} must be one of {', '.join(get_args(kind))}, not {value!r}")
        self._check_options()

    def _check_options(self) -> None:
        for name in ("query_scalar", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1e-3, 1e6)
        if self.rotary_dim is not None:
            check_whole("rotary_dim", self.rotary_dim, 2, self.head_dim)
            if self.rotary_dim % 2:
                raise ShapeError(f"architecture: rotary_dim {self.rotary_dim} must be even (rotary pairs)")
        if self.window is not None and self.window.layers[-1] >= self.total_layers:
            raise ShapeError(f"architecture: layer {self.window.layers[-1]} slides; there are {self.total_layers}")
        if self.experts is not None and self.experts.count * self.total_layers > MAX_EXPERTS:
            count = self.experts.count * self.total_layers
            raise ShapeError(f"architecture: {count} experts in all layers; at most {MAX_EXPERTS} are read")
        if unknown := set(self.eight_bits) - {*get_args(Matrix)}:
            raise ShapeError(f"architecture: eight_bits names {unknown}; there are {', '.join(get_args(Matrix))}")
        if self.is_grouped and any(n % GROUP for n in (self.width, self.query_width, self.mlp_width)):
            sizes = f"{self.width}, {self.query_width} and {self.mlp_width}"
            words = WEIGHT_WORDS[self.weights]
            raise ShapeError(f"architecture: rows of {sizes} numbers; {words} need multiples of {GROUP}")

    @property
    def is_grouped(self) -> bool:
        """True where matrices have 4 or 8 bits."""
        return self.weights in ("q4", "q8")

    def weights_of(self, matrix: Matrix) -> Weights:
        """Kind of the numbers of a layer's matrix."""
        return "q8" if self.weights == "q4" and matrix in self.eight_bits else self.weights

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> LlamaArchitecture:
        """Architecture of a manifest's JSON object. Raises ShapeError or TypeError."""
        given = dict(record)
        if given["family"] != "llama":
            raise ShapeError(f"architecture: family {given['family']!r} is unknown; this version has 'llama'")
        layers, scaling = given.get("layers"), given.get("rope_scaling")
        given["layers"] = tuple(layers) if isinstance(layers, list) else layers
        given["eight_bits"] = tuple(given.get("eight_bits", ()))
        if scaling is not None:
            given["rope_scaling"] = LinearScaling(**scaling) if scaling.keys() == {"factor"} else RopeScaling(**scaling)
        if (window := given.get("window")) is not None:
            given["window"] = SlidingWindow(**{**window, "layers": tuple(window["layers"])})
        if (experts := given.get("experts")) is not None:
            given["experts"] = Experts(**experts)
        return LlamaArchitecture(**given)

    @property
    def parts(self) -> int:
        return len(self.layers)

    @property
    def total_layers(self) -> int:
        """Transformer layers of all stages."""
        return sum(self.layers)

    @property
    def query_width(self) -> int:
        """Numbers in the queries of a position: not always the model's width."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Numbers in queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def query_scale(self) -> float:
        """Attention's scores are multiplied by it."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

    def layers_in(self, part: int) -> int:
        """Transformer layers of one stage."""
        return self.layers[part]

    def slides(self, layer: int) -> bool:
        """True for a layer, counted in the whole model, whose positions see a window only."""
        return self.window is not None and layer in self.window.layers


_NAMES = [field.name for field in fields(LlamaArchitecture)]
_DEFAULTS = {f.name: f.default for f in fields(LlamaArchitecture) if _NAMES.index(f.name) > _NAMES.index("family")}


def drop_defaults(record: dict[str, Any]) -> None:
    """Take the options that a model does not use out of its architecture's record: a manifest that was written before
    there was an option keeps its digest."""
    for name, default in _DEFAULTS.items() if record.get("family") == "llama" else ():
        if record[name] == default:
            del record[name]
