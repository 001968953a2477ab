"""The interface of overlaps: from where a worker goes on while its update travels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from trainer.rounds.tensors import Tensors


@dataclass(frozen=True)
class Known:
    """What a worker knows when it has finished a round: all of it but `own` is one round old."""

    weights: Tensors = field(repr=False)
    """The newest version that has arrived."""
    own: Tensors = field(repr=False)
    """Its own pseudo-gradient of the round that it just finished."""
    own_before: Tensors | None = field(default=None, repr=False)
    """Its own pseudo-gradient in the merge that made `weights`; None if there was none."""
    mean_before: Tensors | None = field(default=None, repr=False)
    """The merged pseudo-gradient that made `weights`; None at version 0."""
    momentum: Tensors | None = field(default=None, repr=False)
    """The outer momentum after that merge; None without one."""


class Overlap(Protocol):
    @property
    def waits(self) -> bool:
        """Whether the worker waits for the version that its update goes into."""
        ...

    def start(self, known: Known) -> Tensors:
        """Weights with which the next round begins."""
        ...
