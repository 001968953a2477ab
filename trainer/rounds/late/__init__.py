"""What an update is worth that comes after its round was closed: one file for each way."""

from __future__ import annotations

from trainer.rounds.late.add import Add
from trainer.rounds.late.base import Late
from trainer.rounds.late.drop import Drop
from trainer.rounds.late.keep import Keep
from trainer.rounds.late.stale import Stale
from trainer.rounds.settings import RoundSettings


def new_late(settings: RoundSettings) -> Late:
    match settings.late:
        case "drop":
            return Drop()
        case "stale":
            return Stale(settings.stale_discount)
        case "keep":
            return Keep()
        case "add":
            return Add()
