"""When a round is closed: one file for each way."""

from __future__ import annotations

from trainer.rounds.deadline.adaptive import Adaptive
from trainer.rounds.deadline.base import Deadline
from trainer.rounds.deadline.fixed import Fixed
from trainer.rounds.deadline.lockstep import Lockstep
from trainer.rounds.settings import RoundSettings


def new_deadline(settings: RoundSettings) -> Deadline:
    match settings.deadline:
        case "lockstep":
            return Lockstep()
        case "fixed":
            return Fixed(settings.deadline_s)
        case "adaptive":
            return Adaptive(settings.quorum, settings.grace, settings.deadline_s)
