"""What one bad update can do to a merge: one file for each way."""

from __future__ import annotations

from trainer.rounds.robust.base import Robust
from trainer.rounds.robust.clip import Clip
from trainer.rounds.robust.none import Trusting
from trainer.rounds.robust.trimmed import Trimmed
from trainer.rounds.settings import RoundSettings


def new_robust(settings: RoundSettings) -> Robust:
    match settings.robust:
        case "none":
            return Trusting()
        case "clip":
            return Clip(settings.clip_factor)
        case "trimmed":
            return Trimmed(settings.trim_share)
