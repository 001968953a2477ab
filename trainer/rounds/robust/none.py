"""Every update as it came."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rounds.update import Share


class Trusting:
    def temper(self, shares: Sequence[Share]) -> list[Share]:
        return list(shares)
