"""Features that later blocks read: the file of a round, and the blocks that run forward to make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onesweep.stages.errors import ConfigError
from onesweep.stages.model.block import Block, Codes
from onesweep.stages.model.codec import FEATURE_LIMIT, Int8
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.data import Corpus, precision
from onesweep.trainer.rounds.codecs import Tensors, share
from onesweep.trainer.rounds.parts import block_name
from onesweep.trainer.rounds.transfer import MAX_FILE_BYTES

CODEC = Int8()  # A scale a position: what hosts send each other


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
        """features: of one step, (sequences, positions, width) float32."""
        return CODEC.encode(features.flatten(0, 1))

    def decode(self, payload: bytes) -> Tensor:
        """Features of one step, (sequences, positions, width) float32. Raises CodecError."""
        rows = CODEC.decode(payload, self.sequences * self.positions, self.width, FEATURE_LIMIT)
        return rows.view(self.sequences, self.positions, self.width)


def is_fed(config: TrainingConfig, index: int) -> bool:
    """True if the features that part `index` reads are brought to it."""
    return config.rounds.context_by == "features" and index > 0


def check_features(config: TrainingConfig) -> None:
    """Raise ConfigError where features are asked for that nobody passes on, or more of them than a file may hold."""
    if config.rounds.context_by != "features":
        return
    if config.architecture.context != "chained":
        raise ConfigError(
            "context_by = features is for blocks that read the features of those before them: "
            'give context = "chained" in [architecture], or context_by = "copies"'
        )
    if (size := FeatureFormat.of(config).size) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the features of a round are {size:,} bytes, above {MAX_FILE_BYTES:,}: "
            'give fewer steps_per_round or sequences, or context_by = "copies"'
        )


class FeatureReader:
    """Runs the earlier blocks forward on one place's text, so that its worker needs no copies. For one thread."""

    def __init__(self, config: TrainingConfig, codes: Codes, corpus: Corpus) -> None:
        self.config, self.corpus, self.format = config, corpus, FeatureFormat.of(config)
        count = config.architecture.parts - 1
        self.blocks = [Block(config.architecture, i, codes).requires_grad_(False) for i in range(count)]

    def take(self, published: Mapping[str, Tensors]) -> None:
        """Use these weights, by part; they are not copied."""
        for block in self.blocks:
            if (weights := published.get(block_name(block.index))) is not None:
                share(block, weights)

    def payload(self, index: int, seed: int, step: int) -> bytes:
        """Features that block `index` reads in one local step of the place whose batches come from `seed`."""
        config = self.config
        text = self.corpus.batch(seed, step, config.sequences, config.architecture.context_length + 1)
        x = text[:, :-1]
        # the precision in which a worker runs its copies
        with torch.no_grad(), precision(config.bfloat16, "cpu"):
            for block in self.blocks[:index]:
                x, _ = block.read(x)
        return self.format.encode(x.float())


def names_before(index: int) -> tuple[str, ...]:
    """Parts whose blocks make the features that block `index` reads."""
    return tuple(map(block_name, range(index)))
