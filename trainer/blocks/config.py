"""Settings of a training run: a TOML file, overridden by flags."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stages.errors import ConfigError
from stages.model.architecture import Architecture
from stages.settings import Checked, from_toml, limits, read_toml
from trainer.blocks.data import Corpus

MAX_COUNT = 2**31
MAX_SECONDS = 1e7

CodecName = Literal["fp32", "int8", "e3m0", "top7", "top32"]
SPARSE: tuple[CodecName, ...] = ("top7", "top32")  # codecs that leave most numbers out


@dataclass(frozen=True)
class RoundSettings(Checked):
    """Settings of training by workers that merge once a round."""

    # The parts to train: blocks of a chain, stages of a scorer, or an AR model as a single part.
    model: Literal["chain", "scorer", "ar"] = "chain"
    # 0: as many as the run's `steps` make.
    rounds: int = field(default=0, metadata=limits(minimum=0, maximum=MAX_COUNT))
    # H: a worker's local steps between two merges.
    steps_per_round: int = field(default=30, metadata=limits(minimum=1, maximum=MAX_COUNT))
    replicas: int = field(default=2, metadata=limits(minimum=1, maximum=1024))  # M: workers per part
    # Outer optimizer: 1 and 0 give a plain mean, which comes closest to training in one place. DiLoCo's momentum of 0.9
    # is far worse in short runs: docs/research/rounds.md.
    outer_rate: float = field(default=1.0, metadata=limits(minimum=1e-6, maximum=10))
    outer_momentum: float = field(default=0.0, metadata=limits(minimum=0, maximum=0.999))
    # Seconds after which a round closes with the updates received, if any; 0: it waits for all present workers.
    deadline_s: float = field(default=600.0, metadata=limits(minimum=0, maximum=MAX_SECONDS))
    # Share of the expected workers after which the others get a grace period: this many times the median arrival.
    quorum: float = field(default=0.5, metadata=limits(minimum=0, maximum=1))
    grace: float = field(default=1.5, metadata=limits(minimum=1, maximum=1000))
    # Factor on an update's weight for each round that it is late; 0 drops it.
    stale_discount: float = field(default=0.5, metadata=limits(minimum=0, maximum=1))
    # Rounds after which a late update is refused.
    max_staleness: int = field(default=8, metadata=limits(minimum=0, maximum=1024))
    codec: CodecName = "int8"  # of updates on the way to the coordinator
    down_codec: CodecName = "int8"  # of new versions on the way to workers: whole in `fp32`, else as differences
    # Source of a scorer stage's input: copies of the earlier stages, which are a round older, or the features that
    # these stages' workers make, from which it learns much more. `auto` uses features if possible.
    context_by: Literal["auto", "copies"] = "auto"
    # `scored`: an update must lower the loss on held-out text; `none` merges every update that is not absurd; `auto`
    # scores if other owners' workers may join. Rules that compare updates with each other did worse against every kind
    # of liar: docs/research/rounds.md#liars.
    robust: Literal["auto", "none", "scored"] = "auto"
    # Multiple of the median accepted norm above which an update is refused as absurd.
    norm_limit: float = field(default=10.0, metadata=limits(minimum=1, maximum=1e6))

    @property
    def by_features(self) -> bool:
        """True if parts read features from the earlier parts' workers during the round: stages that train their rounds
        together."""
        return self.context_by == "auto" and self.model == "scorer"

    def up_codec(self, round_: int) -> CodecName:
        """The codec of a round's updates: the last ones send everything that a sparse codec left out."""
        return "e3m0" if self.codec in SPARSE and round_ == self.rounds - 1 else self.codec

    def version_codec(self, version: int) -> CodecName:
        """The codec of a version: the last one is sent whole if a sparse codec would leave out most of it."""
        return "fp32" if self.down_codec in SPARSE and version == self.rounds else self.down_codec


MAX_WHOLE = 2**53

MatrixOptimizer = Literal["muon", "adamw"]

_COUNT = limits(minimum=1, maximum=MAX_WHOLE)
_WHOLE = limits(minimum=0, maximum=MAX_WHOLE)
_POSITIVE = limits(minimum=0)


@dataclass(frozen=True)
class NoiseConfig(Checked):
    """The chain's noise range and its partition."""

    partition: Literal["equal_entropy", "equal_probability"] = "equal_entropy"
    sigma_min: float = 0.15
    sigma_max: float = 10.0
    overlap: float = field(default=0.05, metadata=limits(minimum=0, maximum=0.999))
    code_seed: int = field(default=0, metadata=limits(minimum=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sigma_min < self.sigma_max:
            raise ConfigError(f"sigma_min {self.sigma_min} must be above 0 and below sigma_max {self.sigma_max}")


@dataclass(frozen=True)
class LookaheadConfig(Checked):
    """Settings for training a scorer's stages separately."""

    # Steps between two refreshes of the workers' copies of each other's stages.
    refresh_every: int = field(default=10, metadata=_COUNT)


@dataclass(frozen=True)
class RunConfig(Checked):
    """Settings of a run that do not depend on the model."""

    steps: int = field(default=2000, metadata=_COUNT)
    # Peak rate of AdamW: embeddings, heads, norms, AdaLN.
    learning_rate: float = field(default=3e-3, metadata=_POSITIVE)
    matrix_learning_rate: float = field(default=2e-2, metadata=_POSITIVE)  # peak rate of the layers' matrices
    # The optimizer of the layers' matrices; AdamW is faster if a step has few tokens.
    matrix_optimizer: MatrixOptimizer = "muon"
    warmup_steps: int = field(default=100, metadata=_WHOLE)
    weight_decay: float = field(default=0.1, metadata=_POSITIVE)
    bfloat16: bool = True
    seed: int = field(default=0, metadata=_WHOLE)
    log_every: int = field(default=20, metadata=_COUNT)
    evaluate_every: int = field(default=500, metadata=_COUNT)
    save_every_s: float = field(default=60.0, metadata=_POSITIVE)

    def record(self, *without: str) -> dict[str, Any]:
        """The settings that determine weights, as JSON values. :param without: others to leave out."""
        without = (*without, "log_every", "evaluate_every", "save_every_s")
        kept = {name: value for name, value in asdict(self).items() if name not in without}
        return json.loads(json.dumps(kept))  # tuples become lists, as when read back


@dataclass(frozen=True)
class TrainingConfig(RunConfig):
    """One run. All compared kinds of training (blocks, AR, local AR) use the same data, steps and batch."""

    architecture: Architecture = field(default_factory=Architecture)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    sequences: int = field(default=8, metadata=_COUNT)  # windows of `architecture.context_length` in a batch
    # Weight of the clean next-byte loss relative to the denoising loss.
    anchor: float = field(default=0.3, metadata=_POSITIVE)
    # Chunk sizes drawn for each batch; 0 is the whole window.
    chunks: tuple[int, ...] = field(default=(1, 8, 32, 64, 0), metadata=_WHOLE)
    # Share of steps in which the block gets its own first guess as the estimate.
    self_condition: float = field(default=0.5, metadata=limits(minimum=0, maximum=1))
    valid_windows: int = field(default=16, metadata=_COUNT)  # windows of validation text per evaluation


def in_tokens_of(config: TrainingConfig, corpus: Corpus) -> TrainingConfig:
    """The same run for a model of the corpus's tokens."""
    return replace(config, architecture=replace(config.architecture, vocabulary=corpus.vocabulary))


def load_config(path: Path | None, **flags: object) -> TrainingConfig:
    """Merge the TOML file at `path` and `flags` (None = not given).

    Raises ConfigError that names the file, the key and its allowed values.
    """
    config = from_toml(TrainingConfig, read_toml(path) if path else {}, str(path))
    return from_toml(TrainingConfig, {key: value for key, value in flags.items() if value is not None}, "flags", config)


def parse_config(text: str, where: str) -> TrainingConfig:
    """Parse settings from another machine: a whole `TrainingConfig` as JSON. Raises ConfigError."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} are damaged: {error}") from None
    return from_toml(TrainingConfig, record, where)
