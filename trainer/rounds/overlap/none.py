"""No overlap: a worker waits for the version that its update went into."""

from __future__ import annotations

from trainer.rounds.tensors import Tensors


class Waiting:
    waits = True

    def start(self, weights: Tensors, own: Tensors | None, merged: bool) -> Tensors:
        return weights

    def state(self) -> Tensors:
        return {}

    def restore(self, state: Tensors) -> None:
        assert not state, "who waits has no state"
