"""What a merge does to the weights of a part: one file for each outer optimizer."""

from __future__ import annotations

from trainer.rounds.outer.base import Outer
from trainer.rounds.outer.delayed import Delayed
from trainer.rounds.outer.mean import Mean
from trainer.rounds.outer.nesterov import Nesterov
from trainer.rounds.outer.radial import Radial
from trainer.rounds.settings import RoundSettings


def new_outer(settings: RoundSettings) -> Outer:
    """The outer optimizer of one part, before its first merge."""
    rate, momentum = settings.outer_rate, settings.outer_momentum
    match settings.outer:
        case "mean":
            return Mean()
        case "nesterov":
            return Nesterov(rate, momentum)
        case "delayed":
            return Delayed(rate, momentum, settings.momentum_every)
        case "radial":
            return Radial(rate, momentum)
