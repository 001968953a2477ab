"""Settings of a training run: a TOML file, and over it flags."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stages.errors import ConfigError
from stages.model.architecture import Architecture
from stages.model.partition import Kind
from stages.settings import check, from_toml, limits, read_toml
from trainer.blocks.round_settings import RoundSettings

if TYPE_CHECKING:
    from trainer.blocks.data import Corpus

MAX_WHOLE = 2**53

Copies = Literal["fp32", "int8"]
MatrixOptimizer = Literal["muon", "adamw"]

_COUNT = limits(least=1, most=MAX_WHOLE)
_WHOLE = limits(least=0, most=MAX_WHOLE)
_POSITIVE = limits(least=0)


@dataclass(frozen=True)
class NoiseConfig:
    """The noise range of the chain and how it is cut."""

    partition: Kind = "equal_entropy"
    sigma_min: float = 0.15
    sigma_max: float = 10.0
    overlap: float = 0.05
    code_seed: int = field(default=0, metadata=limits(least=0))

    def __post_init__(self) -> None:
        check(self)
        if not 0 < self.sigma_min < self.sigma_max:
            raise ConfigError(f"sigma_min {self.sigma_min} must be above 0 and below sigma_max {self.sigma_max}")
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"overlap must be at least 0 and below 1, not {self.overlap}")


@dataclass(frozen=True)
class LookaheadConfig:
    """Training of a scorer's stages apart from each other."""

    # Steps between two refreshes of the copies that the workers have of each other's stages.
    refresh_every: int = field(default=10, metadata=_COUNT)
    copies: Copies = "fp32"  # how the copies travel
    # Weight of a stage's own next-byte loss; at 0 its head learns, and the stage learns nothing from it. With fresh
    # copies that is the gradient of end-to-end training; an own loss pulls each stage towards another aim.
    own_weight: float = field(default=0.0, metadata=_POSITIVE)
    ahead: bool = True  # learn from the last head, through the copies; else from the stage's own loss alone

    def __post_init__(self) -> None:
        check(self)
        if not self.ahead and not self.own_weight:
            raise ConfigError("with ahead = false a stage learns from its own loss: give own_weight above 0")


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run that do not depend on what is trained."""

    steps: int = field(default=2000, metadata=_WHOLE)
    # Peak rate of AdamW: embeddings, heads, norms, AdaLN.
    learning_rate: float = field(default=3e-3, metadata=_POSITIVE)
    matrix_learning_rate: float = field(default=2e-2, metadata=_POSITIVE)  # peak rate of the layers' matrices
    # The optimizer of the layers' matrices; AdamW takes less time where a step has few tokens.
    matrix_optimizer: MatrixOptimizer = "muon"
    warmup_steps: int = field(default=100, metadata=_WHOLE)
    weight_decay: float = field(default=0.1, metadata=_POSITIVE)
    bfloat16: bool = True
    seed: int = field(default=0, metadata=_WHOLE)
    log_every: int = field(default=20, metadata=_COUNT)
    evaluate_every: int = field(default=500, metadata=_COUNT)
    save_every_s: float = field(default=60.0, metadata=_POSITIVE)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class TrainingConfig(RunConfig):
    """One run. All ways of training that are compared (blocks, AR, local AR) use the same data, steps and batch."""

    architecture: Architecture = field(default_factory=Architecture)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    sequences: int = field(default=8, metadata=_COUNT)  # windows of `architecture.context_length` in a batch
    # Weight of the clean next-byte loss beside the denoising loss.
    anchor: float = field(default=0.3, metadata=_POSITIVE)
    # Chunk sizes drawn for each batch; 0 is the whole window.
    chunks: tuple[int, ...] = field(default=(1, 8, 32, 64, 0), metadata=_WHOLE)
    # Share of steps in which the block sees its own first guess as the estimate.
    self_condition: float = field(default=0.5, metadata=_POSITIVE)
    valid_windows: int = field(default=16, metadata=_COUNT)  # windows of validation text in an evaluation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.self_condition > 1:
            raise ConfigError(f"self_condition is a share of the steps, from 0 to 1, not {self.self_condition!r}")
        if not self.chunks:
            raise ConfigError("chunks must be sizes of at least 1, or 0 for the whole window, not ()")


def in_symbols_of(config: TrainingConfig, corpus: Corpus) -> TrainingConfig:
    """The same run for a model of the corpus' symbols."""
    return replace(config, architecture=replace(config.architecture, vocabulary=corpus.vocabulary))


def load_config(path: Path | None, **flags: object) -> TrainingConfig:
    """Merge the TOML file at `path` and `flags` (None = not given).

    Raises ConfigError that names the file, the key and what it may be.
    """
    config = from_toml(TrainingConfig, read_toml(path) if path else {}, str(path))
    return from_toml(TrainingConfig, {key: value for key, value in flags.items() if value is not None}, "flags", config)


def parse_config(text: str, where: str) -> TrainingConfig:
    """Settings as another machine sends them: all of `TrainingConfig` as JSON. Raises ConfigError."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} are damaged: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} are damaged: they are no object")
    return from_toml(TrainingConfig, record, where)
