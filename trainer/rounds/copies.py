"""Copies of parts for those who do not train them: a line of versions of its own, refreshed now and then.

What travels is the rounded difference to the copy before, so that what one refresh rounds away is in the next.
"""

from __future__ import annotations

from trainer.rounds.ledger import KEPT_VERSIONS
from trainer.rounds.publication import publish, route, whole_size
from trainer.rounds.settings import RoundSettings
from trainer.rounds.tensors import Tensors


class CopyLine:
    """One fragment as the workers of other parts have it."""

    def __init__(self, settings: RoundSettings, version: int, weights: Tensors) -> None:
        """:param version, weights: with which the line begins."""
        self.settings = settings
        self.number, self.version, self.tensors = 0, version, weights
        """How often it was refreshed, from which version the last time, and what came of it."""
        self.differences: dict[int, bytes] = {}
        """To the last few copies from those before, by number; none in `fp32`, where a copy travels whole."""

    def follow(self, version: int, weights: Tensors) -> None:
        """Refresh the copy from the newest version, if it is old enough."""
        if version - self.version < self.settings.copies_every:
            return
        self.tensors, difference = publish(weights, self.tensors, self.settings.copies_codec)
        self.number, self.version = self.number + 1, version
        if difference:
            self.differences[self.number] = difference
            self.differences.pop(self.number - KEPT_VERSIONS, None)

    def size(self, held: int | None) -> int:
        """Bytes that bring who holds the copy of this number to the newest; None: who has none."""
        if held == self.number:
            return 0
        differences = route(held, self.number, self.differences.get, self.tensors)
        return sum(map(len, differences.values())) or whole_size(self.tensors)
