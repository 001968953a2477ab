"""The interface of engines: settings and text in, weights out, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stages.errors import ConfigError
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.inprocess import Traffic
from trainer.rounds.tensors import Tensors

VIRTUAL = ("step_s", "latency_s", "up_mbps", "down_mbps", "in_time", "late_rounds", "lost")
"""Settings of a fleet that only virtual workers have."""


@dataclass(frozen=True)
class Tally:
    """One real worker."""

    made: int = 0
    """Local steps."""
    merged: float = 0.0
    """Those of them that were merged, late ones times their worth."""
    busy_s: float = 0.0


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    weights: dict[str, Tensors] = field(repr=False)
    """The newest version of every part, as workers have it."""
    traffic: Traffic
    workers: int
    tallies: Sequence[Tally] = ()
    """Of real workers, part by part, replica by replica."""


class Engine(Protocol):
    def check(self, config: TrainingConfig, fleet: Fleet) -> None:
        """Raise ConfigError for what this engine cannot do."""
        ...

    def train(self, frame: Frame, corpus: Corpus, fleet: Fleet) -> Trained:
        """Make all rounds of a run, what `check` found nothing wrong with. Raises OnesweepError."""
        ...


def check_real(fleet: Fleet) -> None:
    """Raise ConfigError where a fleet asks of real workers what only virtual ones have."""
    for name in VIRTUAL:
        if getattr(fleet, name) != getattr(Fleet(), name):
            raise ConfigError(f"{name} is of virtual workers, real ones have slowness and pace_s: leave it out")
