"""Settings of a training run: a profile, a TOML file, flags; in that order, the later wins."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from stages.architecture import Architecture
from stages.errors import ConfigError, ShapeError
from stages.partition import KINDS, Kind
from trainer.rounds.settings import RoundSettings

MAX_WHOLE = 2**53

Copies = Literal["fp32", "int8"]
Features = Literal["live", "copies"]
MatrixOptimizer = Literal["muon", "adamw"]


@dataclass(frozen=True)
class NoiseConfig:
    """The noise range of the chain and how it is cut."""

    partition: Kind = "equal_entropy"
    sigma_min: float = 0.15
    sigma_max: float = 10.0
    overlap: float = 0.05
    code_seed: int = 0

    def __post_init__(self) -> None:
        if self.partition not in KINDS:
            raise ConfigError(f"partition must be one of {', '.join(KINDS)}, not {self.partition!r}")
        for name in ("sigma_min", "sigma_max", "overlap"):
            if not _is_number(value := getattr(self, name)):
                raise ConfigError(f"{name} must be a finite number, not {value!r}")
        if not 0 < self.sigma_min < self.sigma_max:
            raise ConfigError(f"sigma_min {self.sigma_min} must be above 0 and below sigma_max {self.sigma_max}")
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"overlap must be at least 0 and below 1, not {self.overlap}")
        if not isinstance(self.code_seed, int) or isinstance(self.code_seed, bool) or self.code_seed < 0:
            raise ConfigError(f"code_seed must be a whole number of at least 0, not {self.code_seed!r}")


@dataclass(frozen=True)
class LookaheadConfig:
    """How the stages of a scorer are trained apart."""

    refresh_every: int = 10
    """Steps between two refreshes of the copies that the workers have of each other's stages."""
    copies: Copies = "fp32"
    """How the copies travel."""
    features: Features = "live"
    """What a stage reads: what the stages before it make in this step, sent by them; or what their copies make."""
    own_weight: float = 0.0
    """Weight of a stage's own next-byte loss; at 0 its head learns, and the stage learns nothing from it."""
    ahead: bool = True
    """Whether a stage learns from the last head, through the copies; else from its own loss alone."""
    private_layers: int = 0
    """Layers in each own head, not passed on."""

    def __post_init__(self) -> None:
        for name, least in (("refresh_every", 1), ("private_layers", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
                raise ConfigError(f"{name} must be a whole number from {least} to {MAX_WHOLE}, not {value!r}")
        for name, choices in (("copies", get_args(Copies)), ("features", get_args(Features))):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        if not _is_number(self.own_weight) or self.own_weight < 0:
            raise ConfigError(f"own_weight must be a finite number of at least 0, not {self.own_weight!r}")
        if not isinstance(self.ahead, bool):
            raise ConfigError(f"ahead must be true or false, not {self.ahead!r}")
        if not self.ahead and not self.own_weight:
            raise ConfigError("with ahead = false a stage learns from its own loss: give own_weight above 0")


@dataclass(frozen=True)
class TrainingConfig:
    """One run. Every arm of a comparison (blocks, AR, local AR) uses the same data, steps and batch."""

    profile: str = "onesweep"
    architecture: Architecture = field(default_factory=Architecture)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    steps: int = 2000
    sequences: int = 8
    """Windows of `architecture.context_bytes` in a batch."""
    learning_rate: float = 3e-3
    """Peak rate of AdamW: embeddings, heads, norms, AdaLN."""
    matrix_learning_rate: float = 2e-2
    """Peak rate of the layers' matrices."""
    matrix_optimizer: MatrixOptimizer = "muon"
    """What steps them; AdamW takes less time where a step has few tokens."""
    warmup_steps: int = 100
    weight_decay: float = 0.1
    anchor: float = 0.3
    """Weight of the clean next-byte loss beside the denoising loss."""
    chunks: tuple[int, ...] = (1, 8, 32, 64, 0)
    """Chunk sizes drawn for each batch; 0 is the whole window."""
    self_condition: float = 0.5
    """Share of steps in which the block sees its own first guess as the estimate."""
    edm_weighted: bool = False
    bfloat16: bool = True
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 500
    valid_windows: int = 16
    """Windows of validation text in an evaluation."""
    save_every_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
                raise ConfigError(f"{name} must be a whole number from {least} to {MAX_WHOLE}, not {value!r}")
        for name in _AT_LEAST_ZERO:
            if not _is_number(value := getattr(self, name)) or value < 0:
                raise ConfigError(f"{name} must be a finite number of at least 0, not {value!r}")
        if self.matrix_optimizer not in get_args(MatrixOptimizer):
            choices = ", ".join(get_args(MatrixOptimizer))
            raise ConfigError(f"matrix_optimizer must be one of {choices}, not {self.matrix_optimizer!r}")
        if self.self_condition > 1:
            raise ConfigError(f"self_condition is a share of the steps, from 0 to 1, not {self.self_condition!r}")
        for name in ("edm_weighted", "bfloat16"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {value!r}")
        if not isinstance(self.chunks, tuple) or not self.chunks or any(not _is_chunk(c) for c in self.chunks):
            raise ConfigError(f"chunks must be sizes of at least 1, or 0 for the whole window, not {self.chunks!r}")


_WHOLE = {
    "steps": 0,
    "sequences": 1,
    "warmup_steps": 0,
    "seed": 0,
    "log_every": 1,
    "evaluate_every": 1,
    "valid_windows": 1,
}
_AT_LEAST_ZERO = ("learning_rate", "matrix_learning_rate", "weight_decay", "anchor", "self_condition", "save_every_s")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_chunk(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_WHOLE


PROFILES: dict[str, TrainingConfig] = {
    "onesweep": TrainingConfig(),
    # The recipe of BlockTrain (arXiv 2606.24722): [1, 10], the whole sequence noised at once with the true prefix
    # at every position, equal probability; for comparison with its table, not for text.
    "blocktrain": TrainingConfig(
        profile="blocktrain",
        noise=NoiseConfig(partition="equal_probability", sigma_min=1.0, sigma_max=10.0),
        chunks=(1,),
        self_condition=0.0,
    ),
    # For blocks made from a pretrained model: short windows of tokens, rates for weights that know something already.
    "graft": TrainingConfig(
        profile="graft",
        architecture=Architecture(context_bytes=128, code_dim=64, condition_dim=128, context="chained"),
        noise=NoiseConfig(sigma_min=0.1, sigma_max=3.0),
        steps=400,
        sequences=2,
        learning_rate=1e-3,
        matrix_learning_rate=1e-4,
        warmup_steps=20,
        weight_decay=0.01,
        chunks=(1, 4, 8, 16, 32),
        log_every=10,
        evaluate_every=1000,
    ),
}


def load_config(path: Path | None, profile: str | None = None, **flags: object) -> TrainingConfig:
    """Merge a profile, the TOML file at `path` and `flags` (None = not given; `context` goes to the architecture).

    Raises ConfigError that names the file, the key and what it may be.
    """
    table = _read(path) if path else {}
    named = table.pop("profile", "onesweep")
    name = profile or named
    if not isinstance(name, str) or name not in PROFILES:
        raise ConfigError(f"unknown profile {name!r}; choose from {', '.join(PROFILES)}")
    config = _overlay(PROFILES[name], table, str(path))
    given = {key: value for key, value in flags.items() if value is not None}
    if "context" in given:
        given["architecture"] = {"context": given.pop("context")}
    return _overlay(config, given, "flags")


def parse_config(text: str, where: str) -> TrainingConfig:
    """Settings as another machine sends them: all of `TrainingConfig` as JSON. Raises ConfigError."""
    try:
        record = json.loads(text)
        profile = record.pop("profile")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where} are damaged: {error}") from None
    if profile not in PROFILES:
        raise ConfigError(f"{where}: unknown profile {profile!r}; choose from {', '.join(PROFILES)}")
    return _overlay(PROFILES[profile], record, where)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _overlay(config: Any, table: dict[str, Any], where: str) -> Any:  # noqa: ANN401 - any of the dataclasses above
    """Replace fields of a dataclass by a table's entries, one level of sections deep."""
    known = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "profile"}
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown setting {key!r}; there are {', '.join(sorted(known))}")
        if dataclasses.is_dataclass(known[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {key} must be a section [{key}]")
            changes[key] = _overlay(known[key], value, f"{where} [{key}]")
        else:
            changes[key] = tuple(value) if isinstance(value, list) else value
    try:
        return replace(config, **changes)
    except (ConfigError, ShapeError) as error:
        raise ConfigError(f"{where}: {error}") from None
