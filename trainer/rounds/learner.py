"""The local half of a round: a part, its inner optimizer, and steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trainer.config import TrainingConfig
from trainer.optimizer import OptimizerSet
from trainer.rounds.parts import Part
from trainer.rounds.tensors import Tensors, load, trainable
from trainer.run import train_step


class Learner:
    """Keeps the inner optimizer's state from round to round, as DiLoCo does (arXiv 2311.08105)."""

    def __init__(self, part: Part, config: TrainingConfig) -> None:
        """:param config: settled: its `steps` are those of the whole run."""
        self.part, self.config = part, config
        self.optimizers = OptimizerSet(part.module, config)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights, of the whole part or a fragment."""
        load(self.part.module, weights)

    def train(self, first: int, steps: int) -> dict[str, float]:
        """Make `steps` local steps, the first of which is number `first` of the run; the last one's losses.

        Raises ConfigError for a gradient that is not finite.
        """
        record = dict[str, float]()
        for step in range(first, first + steps):
            record = train_step(self.part, self.optimizers, self.config, step)
        return record

    def weights(self) -> Tensors:
        """A copy, in float32 on the CPU."""
        return trainable(self.part.module)
