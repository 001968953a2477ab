"""Every worker in this process: real training, virtual time and links."""

from __future__ import annotations

from stages.errors import ConfigError
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds import inprocess
from trainer.rounds.engine.base import Trained
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.store import MemoryStore


class InProcess:
    def check(self, config: TrainingConfig, fleet: Fleet) -> None:
        if fleet.pace_s:
            raise ConfigError("pace_s is of real workers, and these are virtual: give step_s instead")

    def train(self, frame: Frame, corpus: Corpus, fleet: Fleet) -> Trained:
        engine = inprocess.Engine(frame, corpus, MemoryStore(), fleet)
        traffic = engine.run()
        return Trained(engine.published(), traffic, len(engine.workers))
