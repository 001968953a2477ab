"""Norms and directions averaged apart, then Nesterov: radial-directional averaging (after arXiv 2604.21428).

Pseudo-gradients that point apart cancel in a plain mean, so it becomes the shorter the more workers there are. Here a
tensor's merged length is the mean of the workers' lengths, and its direction that of the mean of their directions. How
the paper cuts the weights into vectors is not known to us; here each tensor is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.rounds.merge import relative_weights
from trainer.rounds.outer.nesterov import Nesterov
from trainer.rounds.tensors import Tensors
from trainer.rounds.update import Share


class Radial(Nesterov):
    def merge(self, shares: Sequence[Share]) -> Tensors:
        weights = relative_weights(shares)
        return {name: _merged([share.delta[name] for share in shares], weights) for name in shares[0].delta}


def _merged(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    direction, length = torch.zeros_like(tensors[0]), 0.0
    for tensor, weight in zip(tensors, weights, strict=True):
        norm = float(tensor.double().norm())
        length += weight * norm
        if norm > 0:  # in float64: one over the norm of denormal numbers is no float32
            direction.add_((tensor.double() / norm).float(), alpha=weight)
    total = float(direction.double().norm())
    return direction * (length / total) if total > 0 else direction
