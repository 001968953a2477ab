"""Eager updates (arXiv 2502.12996): a worker puts its own part of the merge in place before the others' arrive.

In the paper every worker has weights of its own, stepped with (own now + sum of the others' before) / M, and corrected
one round later. The outer step is linear in what it is given, so those weights are the newest common version plus the
response of the optimizer to the worker's own pseudo-gradients alone: with Nesterov, rate (own + b m) / M, where m is
the momentum of its own. So a worker needs nothing from the others but the common version, which may skip rounds.

`patient` is the same for a worker that does not go ahead: who was in time starts from the merge, and who was late puts
its own part in place instead of waiting on.
"""

from __future__ import annotations

from trainer.rounds.tensors import Tensors, add


class Eager:
    waits = False

    def __init__(self, rate: float, momentum: float, replicas: int) -> None:
        """:param rate, momentum: those of the outer optimizer (1 and 0 for the mean).

        :param replicas: M, workers whose updates make a merge.
        """
        self.rate, self.momentum, self.replicas = rate, momentum, replicas
        self.buffer: Tensors = {}

    def start(self, weights: Tensors, own: Tensors | None, merged: bool) -> Tensors:
        if own is None:
            return weights
        self.buffer = add(own, self.buffer, self.momentum) if self.buffer else own
        if merged:
            return weights
        return add(weights, add(own, self.buffer, self.momentum), -self.rate / self.replicas)

    def state(self) -> Tensors:
        return dict(self.buffer)

    def restore(self, state: Tensors) -> None:
        self.buffer = dict(state)
