"""The shape of a chain that is grafted on a pretrained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stages.architecture import Architecture, Context
from stages.errors import ShapeError
from stages.llama.architecture import LlamaArchitecture

MOST = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of what is added to a block. Raises ShapeError."""

    code_dim: int
    condition_dim: int
    rank: int
    """Of the updates that noisy slots alone see; 0 for none."""

    def __post_init__(self) -> None:
        for name, least in (("code_dim", 1), ("condition_dim", 1), ("rank", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST:
                raise ShapeError(f"{name} must be a whole number from {least} to {MOST}, not {value!r}")


@dataclass(frozen=True)
class GraftArchitecture:
    """A pretrained model's stages as blocks. Raises ShapeError for what cannot be."""

    base: Architecture | LlamaArchitecture
    """Of the pretrained model: its stages are the blocks."""
    shape: Shape
    family: Literal["graft"] = "graft"
    context: ClassVar[Context] = "chained"
    hands_on_slots: ClassVar[bool] = True
    """A pretrained layer in the middle of a model expects features, not codes: slots bring theirs along."""

    def __post_init__(self) -> None:
        if self.family != "graft":
            raise ShapeError(f"architecture: family {self.family!r} is not that of a graft")

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> GraftArchitecture:
        """Of a manifest's JSON object. Raises ShapeError, KeyError or TypeError."""
        base, others = record["base"], {name: value for name, value in record.items() if name not in ("base", "shape")}
        pretrained = LlamaArchitecture.from_record(base) if "family" in base else Architecture(**base)
        return GraftArchitecture(pretrained, Shape(**record["shape"]), **others)

    @property
    def parts(self) -> int:
        return self.base.parts

    @property
    def width(self) -> int:
        return self.base.width

    @property
    def code_dim(self) -> int:
        return self.shape.code_dim

    @property
    def positions(self) -> int:
        """Symbols in a context."""
        return self.base.positions

    @property
    def vocabulary(self) -> int:
        return self.base.vocabulary

    @property
    def kv_heads(self) -> int:
        return self.base.kv_heads

    @property
    def head_dim(self) -> int:
        return self.base.head_dim

    def layers_in(self, part: int) -> int:
        """Transformer layers of one block."""
        return self.base.layers_in(part)
