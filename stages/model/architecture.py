"""The shapes of the two model families: a chain of diffusion blocks and an AR pipeline."""

from dataclasses import dataclass
from functools import cached_property

from stages.errors import ShapeError

# Of a model of bytes. There is no padding and no start symbol: a prompt has at least one symbol.
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
        """Symbols in a context."""
        return self.context_length

    def layers_in(self, part: int) -> int:
        """Transformer layers of one part: of all the same number."""
        return self.layers


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise ShapeError unless a size is a whole number within these bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ShapeError(f"architecture: {name} must be a whole number from {least} to {most}, not {value!r}")
