"""What a worker hands in, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.rounds.tensors import Tensors


@dataclass(frozen=True)
class Update:
    """The pseudo-gradient of one worker for one round of one part (DiLoCo, arXiv 2311.08105)."""

    id: str
    """Idempotency key: the same update sent again has the same."""
    worker: str
    part: str
    base_version: int
    """Version of the part that the worker started from."""
    round: int
    """The round that was open when it started; below that when it comes, the update is late."""
    steps: int
    """Local steps done: the weight in a merge."""
    sequences: int
    """Windows of text seen."""
    delta: Tensors = field(repr=False)
    """base - trained, so that plain SGD with rate 1 goes where the worker went."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Of the last step, in nats; kept for those who watch."""


@dataclass(frozen=True)
class Share:
    """What one update is worth in a merge."""

    weight: float
    delta: Tensors = field(repr=False)
    staleness: int = 0
    """Rounds that it came late."""


@dataclass(frozen=True)
class Verdict:
    """`accepted`: will be merged; `duplicate`: is known already; `dropped`: late, and worth nothing by rule;
    `refused`: wrong, with a sentence for the worker's owner."""

    kind: Literal["accepted", "duplicate", "dropped", "refused"]
    reason: str = ""


@dataclass(frozen=True)
class Merged:
    """A round was closed."""

    part: str
    round: int
    version: int
    """round + 1."""
    updates: tuple[str, ...]
    """Ids of what was merged, sorted."""
    weights: Tensors = field(repr=False)
    """What every worker has of this version."""
    difference: bytes = field(repr=False)
    """From the version before to this one, in the `down_codec`; empty for `fp32`, where the weights travel whole."""
