"""Features that each part passes on to the next, step by step: which parts do, and the file of a round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stages.errors import CheckpointError, ConfigError
from stages.model.codec import FEATURE_LIMIT, Int8
from trainer.blocks.config import TrainingConfig
from trainer.rounds.transfer import MAX_FILE_BYTES

CODEC = Int8()  # A scale a position: what hosts send each other
FEATURES = "features-"  # and a round: the name of its file


@dataclass(frozen=True)
class FeatureFormat:
    """For each local step of a round, in order, one payload of the codec."""

    steps: int
    sequences: int
    positions: int
    width: int

    @classmethod
    def of(cls, config: TrainingConfig) -> FeatureFormat:
        a = config.architecture
        return cls(config.rounds.steps_per_round, config.sequences, a.context_length, a.width)

    @property
    def step_bytes(self) -> int:
        return CODEC.size(self.sequences * self.positions, self.width)

    @property
    def size(self) -> int:
        return self.steps * self.step_bytes

    def encode(self, features: Tensor) -> bytes:
        """features: of one step, (sequences, positions, width)."""
        return CODEC.encode(features.detach().float().cpu().flatten(0, 1))

    def decode(self, payload: bytes) -> Tensor:
        """Features of one step, (sequences, positions, width) float32. Raises CodecError."""
        rows = CODEC.decode(payload, self.sequences * self.positions, self.width, FEATURE_LIMIT)
        return rows.view(self.sequences, self.positions, self.width)


def is_fed(config: TrainingConfig, index: int) -> bool:
    """True if part `index` reads what the worker of the part before passes on."""
    return config.rounds.by_features and index > 0


def passes_on(config: TrainingConfig, index: int) -> bool:
    """True if the worker of part `index` passes on what it makes."""
    return config.rounds.by_features and index < config.architecture.parts - 1


def check_features(config: TrainingConfig) -> None:
    """Raise ConfigError where the features of a round are more than a file may hold."""
    if config.rounds.by_features and (size := FeatureFormat.of(config).size) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the features of a round are {size:,} bytes, above {MAX_FILE_BYTES:,}: "
            'give fewer steps_per_round or sequences, or context_by = "copies"'
        )


def tidy(directory: Path, names: str, oldest: int) -> None:
    """Make a directory of such files, and remove those called so of rounds before `oldest`. Raises CheckpointError."""
    try:
        directory.mkdir(exist_ok=True)
        for path in directory.glob(names):
            if int(path.name.rpartition("-")[2]) < oldest:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror}") from None
