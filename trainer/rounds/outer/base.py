"""The interface of outer optimizers: what a merge does to the weights of a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainer.rounds.tensors import Tensors
from trainer.rounds.update import Share


class Outer(Protocol):
    """One for each part. Its state is plain tensors, so that it is stored with the weights."""

    def step(self, theta: Tensors, shares: Sequence[Share]) -> Tensors:
        """The next version from this one and at least one update, in an order that does not depend on arrival."""
        ...

    def state(self) -> Tensors: ...

    def restore(self, state: Tensors) -> None: ...
