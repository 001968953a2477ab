"""SGD with Nesterov momentum on the mean pseudo-gradient: DiLoCo (arXiv 2311.08105, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rounds.merge import weighted_mean
from trainer.rounds.tensors import Tensors, add
from trainer.rounds.update import Share


class Nesterov:
    """m <- b m + g, theta <- theta - rate (g + b m); torch.optim.SGD(nesterov=True) does the same."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self.buffer: Tensors = {}

    def step(self, theta: Tensors, shares: Sequence[Share]) -> Tensors:
        gradient = self.merge(shares)
        self.buffer = add(gradient, self.buffer, self.momentum) if self.buffer else gradient
        return add(theta, add(gradient, self.buffer, self.momentum), -self.rate)

    def merge(self, shares: Sequence[Share]) -> Tensors:
        return weighted_mean(shares)

    def state(self) -> Tensors:
        return dict(self.buffer)

    def restore(self, state: Tensors) -> None:
        self.buffer = dict(state)
