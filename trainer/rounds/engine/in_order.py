"""One part after the other, each to its end in one place: what all at once is held against."""

from __future__ import annotations

from stages.errors import ConfigError
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.engine.base import Trained
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.inprocess import Traffic
from trainer.rounds.learner import Learner


class InOrder:
    def check(self, config: TrainingConfig, fleet: Fleet) -> None:
        if config.rounds.replicas > 1:
            raise ConfigError("in order, one worker trains each part: give replicas = 1")
        if config.rounds.context_by == "features":
            raise ConfigError("in order, a block reads those before it in the same place: give context_by = copies")

    def train(self, frame: Frame, corpus: Corpus, fleet: Fleet) -> Trained:
        """A part reads the trained ones before it; those after it are as they began."""
        published, names = frame.initial(), frame.names()
        for index, name in enumerate(names):
            learner = Learner(frame.task(index, corpus, frame.config.seed), frame.config)
            learner.part.see(published)
            learner.train(0, frame.config.steps)
            published[name] = learner.weights()
        seconds = len(names) * fleet.training_s(0, frame.config.steps)
        return Trained(published, Traffic(busy_s=seconds, seconds=seconds), len(names))
