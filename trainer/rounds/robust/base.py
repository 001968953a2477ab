"""The interface of robust merges: what one bad update can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainer.rounds.update import Share


class Robust(Protocol):
    def temper(self, shares: Sequence[Share]) -> list[Share]:
        """What the outer optimizer gets instead; at least one for at least one."""
        ...
