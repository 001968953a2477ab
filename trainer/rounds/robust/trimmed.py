"""The mean of each coordinate without its extremes (Yin et al., arXiv 1803.01498, definition 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trainer.rounds.update import Share


class Trimmed:
    """Weights are not heard: who is to be trusted is not known. One share comes out."""

    def __init__(self, share: float) -> None:
        """:param share: of the updates, left out at either end, rounded up while one or two stay; below 1/2."""
        self.share = share

    def temper(self, shares: Sequence[Share]) -> list[Share]:
        cut = min(math.ceil(self.share * len(shares)), (len(shares) - 1) // 2)
        if not cut:
            return list(shares)
        delta = {}
        for name in shares[0].delta:
            ordered = torch.stack([share.delta[name] for share in shares]).sort(dim=0).values
            delta[name] = ordered[cut : len(shares) - cut].mean(dim=0)
        return [Share(sum(share.weight for share in shares), delta)]
