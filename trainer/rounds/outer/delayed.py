"""Delayed Nesterov (arXiv 2401.09135, algorithm 3, with c = 0): gradients at once, momentum every N merges.

Momentum that is moved by each late update goes on in directions that are long stale; here the gradients of N merges
are collected, and the momentum takes their mean and acts once. The paper's server steps for each single worker, N a
round, hence its factor 1/N of every gradient; ours steps for the mean of a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.rounds.merge import weighted_mean
from trainer.rounds.tensors import Tensors, add, scale
from trainer.rounds.update import Share

MOMENTUM, COLLECTED, COUNT = "momentum.", "collected.", "count"


class Delayed:
    def __init__(self, rate: float, momentum: float, every: int) -> None:
        """:param every: N, merges between two updates of the momentum."""
        self.rate, self.momentum, self.every = rate, momentum, every
        self.buffer: Tensors = {}
        self.collected: Tensors = {}
        self.count = 0

    def step(self, theta: Tensors, shares: Sequence[Share]) -> Tensors:
        gradient = weighted_mean(shares)
        self.collected = add(self.collected, gradient) if self.collected else gradient
        self.count += 1
        theta = add(theta, gradient, -self.rate)
        if self.count < self.every:
            return theta
        mean = scale(self.collected, 1 / self.every)
        self.buffer = add(mean, self.buffer, self.momentum) if self.buffer else mean
        self.collected, self.count = {}, 0
        return add(theta, self.buffer, -self.rate * self.momentum)

    def state(self) -> Tensors:
        return {
            **{MOMENTUM + name: tensor for name, tensor in self.buffer.items()},
            **{COLLECTED + name: tensor for name, tensor in self.collected.items()},
            COUNT: torch.tensor(float(self.count)),
        }

    def restore(self, state: Tensors) -> None:
        self.buffer, self.collected = _under(MOMENTUM, state), _under(COLLECTED, state)
        self.count = int(state[COUNT]) if state else 0


def _under(prefix: str, state: Tensors) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
