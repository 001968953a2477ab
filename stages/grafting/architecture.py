"""The shape of a chain that is grafted on a pretrained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stages.errors import ShapeError
from stages.model.architecture import Architecture
from stages.model.families import FamilyArchitecture
from stages.model.llama import LlamaArchitecture

if TYPE_CHECKING:
    from stages.grafting.part import GraftPart

MOST = 4096


@dataclass(frozen=True)
class SlotShape:
    """Sizes of what is added to a block. Raises ShapeError."""

    code_dim: int
    condition_dim: int
    rank: int  # rank of the updates that only noisy slots see; 0 for none

    def __post_init__(self) -> None:
        for name, least in (("code_dim", 1), ("condition_dim", 1), ("rank", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST:
                raise ShapeError(f"{name} must be a whole number from {least} to {MOST}, not {value!r}")


@dataclass(frozen=True)
class GraftArchitecture(FamilyArchitecture):
    """A pretrained model's stages as blocks. Raises ShapeError for another family."""

    shape: SlotShape
    family: Literal["graft"] = "graft"

    def __post_init__(self) -> None:
        if self.family != "graft":
            raise ShapeError(f"architecture: family {self.family!r} is not that of a graft")

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> GraftArchitecture:
        """Build from a manifest's JSON object. Raises ShapeError, KeyError or TypeError."""
        base, others = record["base"], {name: value for name, value in record.items() if name not in ("base", "shape")}
        pretrained = LlamaArchitecture.from_record(base) if "family" in base else Architecture(**base)
        return GraftArchitecture(pretrained, SlotShape(**record["shape"]), **others)

    @property
    def code_dim(self) -> int:
        return self.shape.code_dim

    def new_part(self, index: int) -> GraftPart:
        """A block with weights as before training."""
        from stages.grafting.part import GraftPart

        return GraftPart(self, index)
