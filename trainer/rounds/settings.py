"""Settings of decentralised rounds: the section [rounds] of a training's TOML."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from stages.errors import ConfigError

MAX_ROUNDS = MAX_STEPS = 2**31
MAX_REPLICAS = 1024
MIN_ROBUST = 3
MAX_FRAGMENTS = 256
MAX_STALENESS = 1024
MAX_SECONDS = 1e7

Model = Literal["chain", "scorer", "ar"]
OuterName = Literal["mean", "nesterov", "delayed", "radial"]
OverlapName = Literal["none", "naive", "eager", "patient"]
DeadlineName = Literal["lockstep", "fixed", "adaptive"]
LateName = Literal["drop", "stale", "keep", "add"]
CodecName = Literal["fp32", "bf16", "int8", "e3m0", "ternary"]
ContextBy = Literal["copies", "features"]
RobustName = Literal["none", "clip", "trimmed"]


@dataclass(frozen=True)
class RoundSettings:
    """How parts are trained by workers that meet once a round."""

    model: Model = "chain"
    """What is trained: blocks of a chain, stages of a scorer, or an AR model that is one part."""
    lookahead: bool = False
    """Whether the blocks of a `chained` chain learn from the last head; a scorer's stages do as [lookahead] says."""
    rounds: int = 0
    """0: as many as the `steps` of the run make."""
    steps_per_round: int = 30
    """H: local steps of a worker between two merges."""
    replicas: int = 2
    """M: workers a part."""
    outer: OuterName = "mean"
    outer_rate: float = 1.0
    outer_momentum: float = 0.3
    momentum_every: int = 4
    """`delayed`: merges between two updates of the momentum."""
    overlap: OverlapName = "none"
    """What a worker does while its update travels: waits, goes on from the last version, or from that and its own;
    `patient` waits until the round is closed, and goes on so if that was without it."""
    deadline: DeadlineName = "adaptive"
    deadline_s: float = 600.0
    """Seconds after which a round is closed with what has come, if anything has; `lockstep` knows no deadline."""
    quorum: float = 0.5
    """`adaptive`: share of the expected workers that is waited for."""
    grace: float = 1.5
    """`adaptive`: times the median arrival that the others are given."""
    late: LateName = "stale"
    stale_discount: float = 0.5
    """`stale`: weight lost with each round that an update is late."""
    max_staleness: int = 8
    """Rounds after which an update is refused, whatever `late` says."""
    codec: CodecName = "int8"
    """How updates travel to the coordinator."""
    down_codec: CodecName = "int8"
    """How new versions travel to the workers: `fp32` whole, the others as differences."""
    context_by: ContextBy = "copies"
    """How a block of a `chained` chain gets what it reads: from copies of the blocks before it, which it runs, or as
    the features that these make of the text of each round."""
    copies_codec: CodecName = "fp32"
    """How copies travel of the parts that another is trained with: `fp32` whole, the others as differences."""
    copies_every: int = 1
    """Rounds of a part between two refreshes of the copies that others have of it."""
    fragments: int = 1
    """Pieces of a part that are exchanged in turn within a round; 1 is the whole at its end."""
    robust: RobustName = "none"
    clip_factor: float = 2.0
    """`clip`: times the median norm that an update may have."""
    trim_share: float = 0.25
    """`trimmed`: share of the values that is left out at either end, coordinate by coordinate."""
    norm_limit: float = 10.0
    """Times the median norm of what was accepted before at which an update is refused as absurd."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in get_args(choices):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")
        for name, (least, most) in _WHOLE.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        for name, (low, high) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
        if not isinstance(self.lookahead, bool):
            raise ConfigError(f"lookahead must be true or false, not {self.lookahead!r}")
        if self.outer_momentum >= 1:
            raise ConfigError(f"outer_momentum must be below 1, not {self.outer_momentum!r}")
        if self.fragments > self.steps_per_round:
            raise ConfigError(
                f"{self.fragments} fragments do not find room in a round of {self.steps_per_round} steps; "
                "give fewer fragments, or more steps_per_round"
            )
        if self.context_by == "features" and (self.model != "chain" or self.lookahead or self.fragments > 1):
            raise ConfigError(
                "context_by = features is for the blocks of a chain, which go through their rounds whole: "
                'give model = "chain", lookahead = false and fragments = 1, or context_by = "copies"'
            )
        if self.robust != "none" and self.replicas < MIN_ROBUST:
            raise ConfigError(
                f"robust {self.robust} cannot tell which of {self.replicas} workers is wrong: "
                f"give replicas of at least {MIN_ROBUST}, or robust = none"
            )
        if self.overlap in ("eager", "patient") and self.outer not in ("mean", "nesterov"):
            raise ConfigError(
                f"overlap {self.overlap} repeats the outer step: outer must be mean or nesterov, not {self.outer}"
            )

    @property
    def ahead(self) -> int:
        """Rounds that a worker may begin before they are open."""
        return int(self.overlap in ("naive", "eager"))

    def count(self, steps: int) -> int:
        """Rounds of a run whose workers make `steps` local steps each; the last may have fewer."""
        return self.rounds or -(-steps // self.steps_per_round)


_CHOICES: dict[str, object] = {
    "model": Model,
    "outer": OuterName,
    "overlap": OverlapName,
    "deadline": DeadlineName,
    "late": LateName,
    "codec": CodecName,
    "down_codec": CodecName,
    "context_by": ContextBy,
    "copies_codec": CodecName,
    "robust": RobustName,
}
_WHOLE = {
    "rounds": (0, MAX_ROUNDS),
    "steps_per_round": (1, MAX_STEPS),
    "replicas": (1, MAX_REPLICAS),
    "momentum_every": (1, MAX_ROUNDS),
    "max_staleness": (0, MAX_STALENESS),
    "fragments": (1, MAX_FRAGMENTS),
    "copies_every": (1, MAX_ROUNDS),
}
_NUMBERS = {
    "outer_rate": (1e-6, 10.0),
    "outer_momentum": (0.0, 1.0),
    "deadline_s": (1e-3, MAX_SECONDS),
    "quorum": (0.0, 1.0),
    "grace": (1.0, 1000.0),
    "stale_discount": (0.0, 1.0),
    "clip_factor": (0.1, 1000.0),
    "trim_share": (0.0, 0.49),
    "norm_limit": (1.0, 1e6),
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
