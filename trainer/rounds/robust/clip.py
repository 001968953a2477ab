"""No update may be longer than so many times the median: what is longer keeps its direction only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from trainer.rounds.tensors import norm, scale
from trainer.rounds.update import Share


class Clip:
    """The median is over the updates of one merge. Of two it is their mean: a factor of 2 or more bounds neither."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def temper(self, shares: Sequence[Share]) -> list[Share]:
        norms = [norm(share.delta) for share in shares]
        limit = self.factor * median(norms)
        return [
            replace(share, delta=scale(share.delta, limit / length)) if length > limit else share
            for share, length in zip(shares, norms, strict=True)
        ]
