"""Shapes of models: those trained here, which are chains of diffusion blocks and AR pipelines; and pretrained decoders,
Llama with the options in which other families differ from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final, Literal, get_args

from stages.device import Tensor
from stages.errors import ShapeError
from stages.settings import check, from_toml, limits

# The vocabulary of a byte model. It has no padding and no start token: a prompt has at least one token.
VOCABULARY = 256
SHAPE = "architecture: "
SCALING = f"{SHAPE}rope_scaling: "
MAX_LAYERS = 1024  # all layers are built before their tensors are compared with the file, which takes time

CONTEXT = "own"  # in manifests, the input of a block's clean stream: the text. No other value exists.

_SIZE, _LAYERS = limits(minimum=1, maximum=1 << 20), limits(minimum=1, maximum=MAX_LAYERS)
_SEVERAL = limits(minimum=2, maximum=1 << 20)  # a single one has no next one to learn from
_WIDTH = limits(minimum=1, maximum=1 << 16)  # an index in a row takes 16 bits on the wire


@dataclass(frozen=True)
class Architecture:
    """Sizes shared by every block of a chain, or every stage of an AR pipeline.

    `parts` counts blocks (chain) or stages (AR); `layers` counts transformer layers in *one* part.
    """

    parts: int = field(default=3, metadata=_SIZE)
    layers: int = field(default=2, metadata=_LAYERS)
    width: int = field(default=128, metadata=_WIDTH)
    heads: int = field(default=4, metadata=_SIZE)
    context_length: int = field(default=512, metadata=_SEVERAL)
    code_dim: int = field(default=32, metadata=_SIZE)
    condition_dim: int = field(default=64, metadata=_SIZE)
    vocabulary: int = field(default=VOCABULARY, metadata=_SEVERAL)

    def __post_init__(self) -> None:
        check(self, ShapeError, SHAPE)
        if self.parts * self.layers > MAX_LAYERS:
            raise ShapeError(f"architecture: {self.parts * self.layers} layers; the limit is {MAX_LAYERS}")
        if self.width % (2 * self.heads):
            raise ShapeError(
                f"architecture: width {self.width} must be an even multiple of heads {self.heads} (rotary pairs)"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: one per query head."""
        return self.heads

    @cached_property
    def positions(self) -> int:
        """Tokens in a context."""
        return self.context_length

    def layers_in(self, part: int) -> int:
        """Transformer layers of one part: the same number in all."""
        return self.layers


def check_whole(name: str, value: object, minimum: int, maximum: int) -> None:
    """Raise ShapeError unless a size is a whole number within these bounds."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise ShapeError(f"architecture: {name} must be a whole number from {minimum} to {maximum}, not {value!r}")


# Biases of attention's products: none (Llama), queries, keys and values (Qwen 2), or the output's as well.
Bias = Literal["none", "qkv", "all"]
# RMSNorm of queries and keys before they are rotated: none, of each head (Qwen 3), of all heads together (OLMo 2).
QkNorm = Literal["none", "head", "projection"]
# RMSNorm of the inputs of attention and the MLP (Llama), of their outputs (OLMo 2), or of both (Gemma).
Norms = Literal["before", "after", "both"]
Activation = Literal["silu", "gelu_tanh"]  # of the MLP's gate; gelu in its tanh form
Matrix = Literal["qkv", "attention_out", "mlp_in", "mlp_out"]  # of a layer, or of each of its experts
# Weights of the layers' matrices: 4 bytes, 2 bytes, 8 bits with a scale for every 32 of them, or 4 bits with a scale
# and an offset for every 32. With either of the last two, the embedding and the head have 8 bits.
Weights = Literal["float32", "bfloat16", "q8", "q4"]
WEIGHT_WORDS: dict[str, str] = {
    "bfloat16": "bfloat16 weights",
    "q8": "8-bit weights",
    "q4": "4-bit weights",
}

MAX_POSITIONS = 1 << 22
MAX_EXPERTS = 1 << 15  # in all layers together
GROUP = 32  # weights of 4 or 8 bits that share a scale
_POSITIONS, _THETA = limits(minimum=2, maximum=MAX_POSITIONS), limits(minimum=1.0, maximum=1e12)
_FACTOR, _SCALE = limits(minimum=0.01, maximum=1e4), limits(minimum=1e-3, maximum=1e6)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's longer rotary wavelengths (`rope_type` llama3): those beyond the original context are stretched by
    `factor`, those well within it stay, and those in between change smoothly."""

    factor: float = field(metadata=_FACTOR)
    low_frequency_factor: float = field(metadata=_FACTOR)
    high_frequency_factor: float = field(metadata=_FACTOR)
    original_positions: int = field(metadata=_POSITIONS)

    def __post_init__(self) -> None:
        check(self, ShapeError, SCALING)
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ShapeError(
                f"{SCALING}low_frequency_factor {self.low_frequency_factor} must be below "
                f"high_frequency_factor {self.high_frequency_factor}"
            )


@dataclass(frozen=True)
class LinearScaling:
    """All rotary wavelengths stretched by `factor` (`rope_type` linear)."""

    factor: float = field(metadata=_FACTOR)

    def __post_init__(self) -> None:
        check(self, ShapeError, SCALING)


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding attention: in these layers a position sees itself and the `size` - 1 positions before it."""

    size: int = field(metadata=limits(minimum=1, maximum=MAX_POSITIONS))
    layers: tuple[int, ...] = field(metadata=limits(minimum=0, maximum=MAX_LAYERS - 1))  # in the whole model, in order
    rope_theta: float | None = field(default=None, metadata=_THETA)  # theirs, unscaled, unless it is the model's

    def __post_init__(self) -> None:
        check(self, ShapeError, f"{SHAPE}window: ")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ShapeError("architecture: window: layers must list each sliding layer once, in order")


@dataclass(frozen=True)
class Experts:
    """A mixture of MLPs: a router chooses `used` of `count` for each position, and adds them with its weights."""

    count: int = field(metadata=limits(minimum=2, maximum=MAX_EXPERTS))
    used: int
    normalised: bool  # the weights of the used experts add up to one

    def __post_init__(self) -> None:
        check(self, ShapeError, f"{SHAPE}experts: ")
        check_whole("experts: used", self.used, 1, self.count)


@dataclass(frozen=True)
class LlamaArchitecture:
    """Sizes of a model with RMSNorm, grouped-query attention with rotary embedding, and SwiGLU, cut into stages.

    Raises ShapeError for impossible sizes. If the head is `tied` to the embedding, a lone stage stores that matrix
    once; of several stages, the last has a copy of it, as a host holds only its own stage.
    """

    # Transformer layers of each stage: stages are cut by cost, including the head's.
    layers: tuple[int, ...] = field(metadata=_LAYERS)
    width: int = field(metadata=limits(minimum=2, maximum=1 << 16))
    heads: int = field(metadata=limits(minimum=1, maximum=1 << 12))
    kv_heads: int = field(metadata=limits(minimum=1, maximum=1 << 12))
    head_dim: int = field(metadata=limits(minimum=2, maximum=1 << 12))
    mlp_width: int = field(metadata=_SIZE)  # of each expert, if there are several
    positions: int = field(metadata=_POSITIONS)
    vocabulary: int = field(metadata=limits(minimum=2, maximum=1 << 22))
    norm_epsilon: float = field(default=1e-5, metadata=limits(minimum=1e-12, maximum=0.1))
    rope_theta: float = field(default=10000.0, metadata=_THETA)
    rope_scaling: RopeScaling | LinearScaling | None = None
    tied_head: bool = False
    attention_bias: Bias = "none"
    family: Literal["llama"] = "llama"
    # Options that Llama lacks. A manifest contains only those that differ from these defaults: see `drop_defaults`.
    qk_norm: QkNorm = "none"
    norms: Norms = "before"
    activation: Activation = "silu"
    rotary_dim: int | None = None  # rotated numbers of a head; None for all
    # Attention's scores are divided by its square root; None for head_dim.
    query_scalar: float | None = field(default=None, metadata=_SCALE)
    attention_softcap: float | None = field(default=None, metadata=_SCALE)
    logit_softcap: float | None = field(default=None, metadata=_SCALE)
    window: SlidingWindow | None = None
    experts: Experts | None = None
    weights: Weights = "float32"
    eight_bits: tuple[Matrix, ...] = ()  # matrices with 8 bits where the other weights have 4

    def __post_init__(self) -> None:
        check(self, ShapeError, SHAPE)
        if self.total_layers > MAX_LAYERS:
            raise ShapeError(f"architecture: {self.total_layers} layers; the limit is {MAX_LAYERS}")
        if self.heads % self.kv_heads:
            raise ShapeError(f"architecture: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ShapeError(f"architecture: head_dim {self.head_dim} must be even (rotary pairs)")
        self._check_options()

    def _check_options(self) -> None:
        if self.rotary_dim is not None:
            check_whole("rotary_dim", self.rotary_dim, 2, self.head_dim)
            if self.rotary_dim % 2:
                raise ShapeError(f"architecture: rotary_dim {self.rotary_dim} must be even (rotary pairs)")
        if self.window is not None and self.window.layers[-1] >= self.total_layers:
            raise ShapeError(f"architecture: window lists layer {self.window.layers[-1]}, over {self.total_layers - 1}")
        if self.experts is not None and self.experts.count * self.total_layers > MAX_EXPERTS:
            count = self.experts.count * self.total_layers
            raise ShapeError(f"architecture: {count} experts in all layers; the limit is {MAX_EXPERTS}")
        if unknown := set(self.eight_bits) - {*get_args(Matrix)}:
            raise ShapeError(f"architecture: eight_bits names {unknown}; choose from {', '.join(get_args(Matrix))}")
        rows = {"mlp_out": self.mlp_width, "attention_out": self.query_width, "qkv": self.width}
        for name, numbers in rows.items() if self.is_grouped else ():
            if numbers % GROUP:
                message = f"rows of {name} have {numbers} numbers, but {WEIGHT_WORDS[self.weights]} need multiples of"
                raise ShapeError(f"architecture: {message} {GROUP}; bfloat16 and float32 take any")

    @property
    def is_grouped(self) -> bool:
        """True if matrices have 4 or 8 bits."""
        return self.weights in ("q4", "q8")

    def weights_of(self, matrix: Matrix) -> Weights:
        """The kind of weights in a layer's matrix."""
        return "q8" if self.weights == "q4" and matrix in self.eight_bits else self.weights

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> LlamaArchitecture:
        """Architecture of a manifest's JSON object. Raises InputError."""
        given = dict(record)
        if given["family"] != "llama":
            raise ShapeError(f"architecture: family {given['family']!r} is unknown; this version has 'llama'")
        is_linear = isinstance(scaling := given.get("rope_scaling"), dict) and scaling.keys() == {"factor"}
        scales = LinearScaling if is_linear else RopeScaling
        for name, kind in (("rope_scaling", scales), ("window", SlidingWindow), ("experts", Experts)):
            if given.get(name) is not None:
                given[name] = from_toml(kind, given[name], f"{SHAPE}{name}")
        return from_toml(LlamaArchitecture, given, "architecture")

    @property
    def parts(self) -> int:
        return len(self.layers)

    @property
    def total_layers(self) -> int:
        """Transformer layers in all stages."""
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
        """The factor of attention's scores."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

    def layers_in(self, part: int) -> int:
        """Transformer layers of one stage."""
        return self.layers[part]

    def slides(self, layer: int) -> bool:
        """True if the positions of a layer, counted in the whole model, see only a window."""
        return self.window is not None and layer in self.window.layers


_NAMES = [field.name for field in fields(LlamaArchitecture)]
_DEFAULTS = {f.name: f.default for f in fields(LlamaArchitecture) if _NAMES.index(f.name) > _NAMES.index("family")}


def drop_defaults(record: dict[str, Any]) -> None:
    """Remove unused options from an architecture's record, so that a manifest written before an option existed keeps
    its digest."""
    for name, default in _DEFAULTS.items() if record.get("family") == "llama" else ():
        if record[name] == default:
            del record[name]


TextArchitecture = Architecture | LlamaArchitecture


# Picture models.
PICTURES: Final = "picture"
# Standard deviation of the net's input: c_skip, c_out and the usual noise prior assume it (EDM, arXiv
# 2206.00364).
DATA_STD = 0.5
MAX_SIDE, MAX_CHANNELS, MAX_TOKENS, MAX_CLASSES = 1024, 4, 4096, 10_000
MAX_CLASS_NAME = 64
_SIDE, _COUNT, _FEATURES = (limits(minimum=1, maximum=most) for most in (MAX_SIDE, 1 << 10, 1 << 14))


@dataclass(frozen=True)
class PictureArchitecture:
    """Sizes shared by all blocks of a picture chain, or by all stages of an undivided net (DiT, arXiv 2212.09748).

    `parts` counts blocks or stages, `layers` transformer layers in *one* of them; `features` is the net's width.
    """

    height: int = field(metadata=_SIDE)
    width: int = field(metadata=_SIDE)
    channels: int = field(metadata=limits(minimum=1, maximum=MAX_CHANNELS))
    classes: tuple[str, ...]
    # A patch is a row on the wire, with its own scale: larger patches cost fewer bytes and see less detail.
    patch: int = field(default=4, metadata=_SIDE)
    parts: int = field(default=3, metadata=_COUNT)
    layers: int = field(default=2, metadata=_COUNT)
    features: int = field(default=96, metadata=_FEATURES)
    heads: int = field(default=4, metadata=_COUNT)
    condition_dim: int = field(default=96, metadata=_FEATURES)
    # Of the training pixels, from 0 to 1: the net sees pixels of mean 0 and standard deviation DATA_STD.
    mean: float = field(default=0.5, metadata=limits(minimum=0, maximum=1))
    deviation: float = field(default=0.25, metadata=limits(minimum=1e-3, maximum=1))
    # Distinguishes it from the other architectures in manifests.
    family: Literal["picture"] = PICTURES  # a manifest's name for this kind of model

    def __post_init__(self) -> None:
        check(self, ShapeError, SHAPE)
        if self.parts * self.layers > MAX_LAYERS:
            raise ShapeError(f"architecture: {self.parts * self.layers} layers; the limit is {MAX_LAYERS}")
        if self.height % self.patch or self.width % self.patch:
            raise ShapeError(f"architecture: {self.height} x {self.width} pixels do not fill patches of {self.patch}")
        if self.tokens > MAX_TOKENS:
            raise ShapeError(f"architecture: {self.tokens} patches in a picture, over {MAX_TOKENS}: raise patch")
        if self.features % self.heads:
            raise ShapeError(f"architecture: features {self.features} must be a multiple of heads {self.heads}")
        if not 1 <= len(self.classes) <= MAX_CLASSES or len(set(self.classes)) != len(self.classes):
            raise ShapeError(f"architecture: needs 1 to {MAX_CLASSES} classes with different names")
        for name in self.classes:
            if not 0 < len(name) <= MAX_CLASS_NAME or not name.isprintable():
                raise ShapeError(f"architecture: a class needs a printable name of at most {MAX_CLASS_NAME} characters")

    @property
    def tokens(self) -> int:
        """Patches of a picture."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def patch_dim(self) -> int:
        """Numbers in a patch."""
        return self.patch * self.patch * self.channels

    @property
    def limit(self) -> float:
        """Largest magnitude of a picture's number as the net sees it."""
        low, high = self.bounds
        return max(-low, high)

    @property
    def bounds(self) -> tuple[float, float]:
        """Black and white as the net sees them."""
        scale = DATA_STD / self.deviation
        return -self.mean * scale, (1 - self.mean) * scale

    def to_rows(self, pixels: Tensor) -> Tensor:
        """Patches of pictures as the net sees them: (pictures, tokens, patch_dim) float32.

        pixels: (pictures, channels, height, width) uint8.
        """
        p, n = self.patch, pixels.shape[0]
        y = (pixels.float() / 255 - self.mean) * (DATA_STD / self.deviation)
        y = y.view(n, self.channels, self.height // p, p, self.width // p, p)
        return y.permute(0, 2, 4, 1, 3, 5).reshape(n, self.tokens, self.patch_dim)

    def to_pixels(self, rows: Tensor) -> Tensor:
        """The reverse: (pictures, channels, height, width) uint8, from (pictures, tokens, patch_dim)."""
        p, n = self.patch, rows.shape[0]
        y = rows.view(n, self.height // p, self.width // p, self.channels, p, p).permute(0, 3, 1, 4, 2, 5)
        y = y.reshape(n, self.channels, self.height, self.width)
        return ((y * (self.deviation / DATA_STD) + self.mean) * 255).round().clamp(0, 255).byte()
