"""Shapes of models that are trained here, chains of diffusion blocks and AR pipelines; and all that families of
pretrained decoders differ in, beside their sizes."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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
            most = {"width": 1 << 16, "layers": MAX_LAYERS}.get(
                name, 1 << 20
            )  # a place in a row takes 16 bits on the wire
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
# Of the matrices in layers: numbers of 4 bytes, of 2, or of 4 bits with a scale and an offset for 32 of them.
Weights = Literal["float32", "bfloat16", "q4"]
WEIGHT_WORDS: dict[str, str] = {"bfloat16": "weights in bfloat16", "q4": "weights of 4 bits"}

MAX_POSITIONS = 1 << 22
MAX_EXPERTS = 1 << 15  # in all layers together


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
