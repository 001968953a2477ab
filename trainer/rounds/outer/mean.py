"""The plain average of where the workers went, as federated averaging does (arXiv 1602.05629)."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rounds.merge import weighted_mean
from trainer.rounds.tensors import Tensors, subtract
from trainer.rounds.update import Share


class Mean:
    def step(self, theta: Tensors, shares: Sequence[Share]) -> Tensors:
        return subtract(theta, weighted_mean(shares))

    def state(self) -> Tensors:
        return {}

    def restore(self, state: Tensors) -> None:
        assert not state, "the mean has no state"
