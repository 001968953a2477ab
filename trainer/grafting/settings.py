"""What of a graft is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stages.errors import ConfigError

Trains = Literal["slots", "block"]
"""`slots`: what noisy slots have of their own; the pretrained weights stay. `block`: those of its layers, too."""
AnchorHead = Literal["own", "last"]
"""Where the clean next-token loss is taken: at the block's end, or at the model's, through the frozen stages after."""


@dataclass(frozen=True)
class GraftSettings:
    """What is trained of one block."""

    block: int
    trains: Trains = "slots"
    anchor_head: AnchorHead = "last"

    def __post_init__(self) -> None:
        for name, choices in (("trains", get_args(Trains)), ("anchor_head", get_args(AnchorHead))):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
