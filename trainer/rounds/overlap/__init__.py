"""From where a worker goes on while its update travels: one file for each way."""

from __future__ import annotations

from trainer.rounds.overlap.base import Overlap
from trainer.rounds.overlap.eager import Eager
from trainer.rounds.overlap.naive import Naive
from trainer.rounds.overlap.none import Waiting
from trainer.rounds.settings import RoundSettings


def new_overlap(settings: RoundSettings) -> Overlap:
    """The overlap of one worker, before its first round."""
    match settings.overlap:
        case "none":
            return Waiting()
        case "naive":
            return Naive()
        case "eager" | "patient":
            nesterov = settings.outer == "nesterov"
            rate, momentum = (settings.outer_rate, settings.outer_momentum) if nesterov else (1.0, 0.0)
            return Eager(rate, momentum, settings.replicas)
