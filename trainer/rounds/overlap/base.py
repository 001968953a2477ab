"""The interface of overlaps: from where a worker goes on while its update travels."""

from __future__ import annotations

from typing import Protocol

from trainer.rounds.tensors import Tensors


class Overlap(Protocol):
    """The worker's side; one for each worker and part (or fragment)."""

    @property
    def waits(self) -> bool:
        """Whether the worker waits until its update has arrived, however late."""
        ...

    def start(self, weights: Tensors, own: Tensors | None, merged: bool) -> Tensors:
        """Weights with which the next round begins.

        weights: the newest version that has arrived; own: the worker's pseudo-gradient of the round that it has just
        finished, None before the first; merged: whether it is in `weights`. Called once a round.
        """
        ...

    def state(self) -> Tensors: ...

    def restore(self, state: Tensors) -> None: ...
