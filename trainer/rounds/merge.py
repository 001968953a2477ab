"""Updates merged: the mean, weighted by work done, accumulated in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer.rounds.tensors import Tensors, scale, zeros_like
from trainer.rounds.update import Share


def relative_weights(shares: Sequence[Share]) -> list[float]:
    """Weights that sum to 1."""
    total = sum(share.weight for share in shares)
    return [share.weight / total for share in shares]


def of_all(shares: Sequence[Share], workers: int) -> list[Share]:
    """Scaled so that their weighted mean is sum(weight * delta) / (workers * heaviest weight)."""
    whole = workers * max(share.weight for share in shares)
    factor = sum(share.weight for share in shares) / whole
    return [replace(share, delta=scale(share.delta, factor)) for share in shares]


def weighted_mean(shares: Sequence[Share]) -> Tensors:
    """sum(weight * delta) / sum(weight), of at least one share."""
    mean = zeros_like(shares[0].delta)
    for share, weight in zip(shares, relative_weights(shares), strict=True):
        for name, total in mean.items():
            total.add_(share.delta[name], alpha=weight)
    return mean
