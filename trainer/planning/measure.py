"""How long a local step takes on this machine, and what it saves for its backward pass: a few real steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.memory import saved_for_backward
from trainer.planning.inventory import take_inventory
from trainer.rounds.feature_reader import feed_nothing
from trainer.rounds.frame import Frame
from trainer.rounds.learner import Learner

STEPS = 5
"""After one that warms up; the middle one counts, for the chunks that are drawn differ from step to step."""


@dataclass(frozen=True)
class MeasuredStep:
    seconds: float
    activations: int
    """Bytes, the most of all steps."""


def measure_step(config: TrainingConfig, corpus: Corpus) -> MeasuredStep:
    """Train the part that computes most. Raises ConfigError, DataError."""
    frame, parts = Frame.of(config, corpus), take_inventory(config)
    index = max(range(len(parts)), key=lambda i: parts[i].passes)
    learner = Learner(feed_nothing(frame.task(index, corpus, config.seed), frame), frame.config)
    weights = {p.untyped_storage().data_ptr() for p in learner.part.module.parameters()}
    times, activations = [], 0
    for step in range(STEPS + 1):
        begin = time.monotonic()
        with saved_for_backward(weights) as saved:
            learner.train(step, 1)
        times.append(time.monotonic() - begin)
        activations = max(activations, sum(saved.values()))
    return MeasuredStep(statistics.median(times[1:]), activations)
