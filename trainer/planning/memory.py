"""What a worker and a coordinator hold at their peaks, counted as the objects that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.cost import FP32_BYTES
from trainer.planning.inventory import PartInventory
from trainer.planning.traffic import Traffic
from trainer.rounds.offers import KEPT
from trainer.rounds.outer import new_outer
from trainer.rounds.settings import RoundSettings
from trainer.rounds.update import Share

MERGED = 3
"""Tensors of a part that a merge holds beside the updates: their mean, the step, and the next version."""


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes."""

    weights: int
    gradients: int
    """Gone when a round ends."""
    optimizer: int
    """Of Muon and AdamW, all float32."""
    copies: int
    """Frozen parts that it reads or looks ahead through, or the features of one step."""
    rounds: int
    """Where the round began, what the codec rounded away, what the overlap remembers."""
    encoding: int
    """For as long as an update is made and saved."""
    activations: int | None = None
    """Of one step, where they were measured."""

    @property
    def total(self) -> int:
        """At the worse of two moments: the backward pass of a step, and the end of a round."""
        stays = self.weights + self.optimizer + self.copies + self.rounds
        return stays + max(self.gradients + (self.activations or 0), self.encoding)


def worker_memory(part: PartInventory, traffic: Traffic, settings: RoundSettings) -> WorkerMemory:
    """All but activations.

    Beside the weights stays the version that the round began with (`held` of trainer/rounds/holdings.py). A lossy codec
    adds its error feedback; who does not wait its own last update; `eager` a base of its own, and the momentum of its
    own updates; so does `patient`, which is the same object.
    """
    whole, lossy = part.weight_bytes, settings.codec != "fp32"
    eager, waits = settings.overlap in ("eager", "patient"), settings.overlap == "none"
    rounds = whole * (1 + lossy + (not waits) + 2 * eager)
    # feedback: update, what is wanted, what that comes to, what is left; saving: update, weights, payload twice
    feedback = 4 * whole + traffic.up if lossy else 0
    encoding = max(feedback, 2 * whole + 2 * traffic.up)
    return WorkerMemory(
        weights=whole,
        gradients=whole,
        optimizer=part.optimizer_bytes,
        copies=part.copied_bytes + feature_bytes(part),
        rounds=rounds,
        encoding=encoding,
    )


def coordinator_memory(parts: Sequence[PartInventory], traffic: Sequence[Traffic], settings: RoundSettings) -> int:
    """Bytes at its peak: while the part that is largest is merged."""
    wholes = [part.weight_bytes for part in parts]
    versions = sum(wholes) * (1 + outer_tensors(settings))
    files = KEPT["whole"] * sum(wholes)
    if settings.down_codec != "fp32":
        # what the workers have is not what the optimizer steps from, and travels as differences
        versions += sum(wholes)
        files += KEPT["difference"] * sum(each.down for each in traffic)
    merging = max(
        settings.replicas * whole + MERGED * whole + each.up for whole, each in zip(wholes, traffic, strict=True)
    )
    return versions + files + merging + max(map(feature_bytes, parts))


def feature_bytes(part: PartInventory) -> int:
    """Features of one step, as numbers and as they travel; those of the other steps are on the disk."""
    form = part.features
    return form.step_bytes + form.sequences * form.positions * form.width * FP32_BYTES if form else 0


def outer_tensors(settings: RoundSettings) -> int:
    """Numbers that an outer optimizer keeps for each parameter."""
    outer, one = new_outer(settings), {"x": torch.ones(64)}
    outer.step(one, [Share(1.0, one)])
    return sum(tensor.numel() for tensor in outer.state().values()) // 64
