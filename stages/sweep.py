"""One block's part of a sweep: Euler steps over its noise range, against the KV cache of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.ar import new_caches
from stages.block import Block
from stages.codec import ESTIMATE_LIMIT, FEATURE_LIMIT, Int8, StateCodec
from stages.noise import Trajectory, step_sigmas
from stages.partition import NoisePartition
from stages.randomness import Purpose, normals, sample_bytes

FEATURES = Int8()
"""How clean features travel between `chained` blocks."""


@dataclass(frozen=True)
class SweepPlan:
    """What every block must agree on to denoise the same chunk."""

    seed: int
    start: int
    """Position of the first noisy slot: the number of clean bytes before the chunk."""
    slots: int
    steps: int
    """Euler steps in each block."""
    temperature: float


class BlockSequence:
    """A block together with the clean bytes of one sequence that it has read so far."""

    def __init__(self, block: Block, partition: NoisePartition, capacity: int) -> None:
        self.block, self.partition = block, partition
        self.caches = new_caches(block.architecture.layers, block.architecture, capacity)

    @property
    def length(self) -> int:
        """Clean positions read so far."""
        return self.caches[0].length

    @torch.inference_mode()
    def read(self, source: Tensor) -> Tensor:
        """Append clean positions (bytes (positions,) or features (positions, width)); return their features."""
        features, _ = self.block.read(source[None], self.caches)
        return features[0]

    @torch.inference_mode()
    def denoise(self, plan: SweepPlan, estimate: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run this block's steps. estimate: E so far (slots, code_dim), None before the first step.

        Returns the new estimate and the logits (slots, 256) of the last evaluation. The last block of a chain
        evaluates once more at sigma_min, where the text is read out.
        """
        block, dim = self.block, self.block.architecture.code_dim
        trajectory = Trajectory(self.partition.sigma_max)
        initial = trajectory.sigma_start * normals(plan.seed, Purpose.INITIAL_NOISE, plan.start, plan.slots, dim)[None]
        current = torch.zeros_like(initial) if estimate is None else estimate[None]
        memory = [cache.stored() for cache in self.caches]
        high, low = self.partition.range(block.index)
        sigmas = step_sigmas(high, low, plan.steps)
        for sigma, sigma_next in pairwise(sigmas):
            logits = self._evaluate(trajectory, initial, current, sigma, memory, plan.start)
            current = trajectory.advance(current, block.point(logits), sigma, sigma_next)
        if block.index == block.architecture.parts - 1:
            logits = self._evaluate(trajectory, initial, current, low, memory, plan.start)
        return current[0], logits[0]

    def _evaluate(
        self,
        trajectory: Trajectory,
        initial: Tensor,
        estimate: Tensor,
        sigma: float,
        memory: list[tuple[Tensor, Tensor]],
        start: int,
    ) -> Tensor:
        z = trajectory.state(initial, estimate, sigma)
        return self.block.denoise(z, estimate, torch.full((1, 1), sigma), memory, start)


@dataclass(frozen=True)
class Boundary:
    """What passes from one block to the next, encoded: this is what a hop carries."""

    estimate: bytes
    features: bytes
    """Clean features of the positions read in this sweep; empty unless the chain is `chained`."""


def run_block(
    sequence: BlockSequence, plan: SweepPlan, codec: StateCodec, clean: bytes, before: Boundary | None
) -> Boundary | bytes:
    """Read the new clean bytes and denoise: a boundary for the next block, or the chunk's text after the last.

    The boundary is encoded even when the next block is on the same host, so that the text does not depend on
    which host holds which block.
    """
    block, a = sequence.block, sequence.block.architecture
    features = torch.empty(0, a.width)
    if clean:
        if block.reads_bytes:
            source = torch.frombuffer(bytearray(clean), dtype=torch.uint8).long()
        else:
            assert before is not None
            source = FEATURES.decode(before.features, len(clean), a.width, FEATURE_LIMIT)
        features = sequence.read(source)
    estimate = None if before is None else codec.decode(before.estimate, plan.slots, a.code_dim, ESTIMATE_LIMIT)
    estimate, logits = sequence.denoise(plan, estimate)
    if block.index == a.parts - 1:
        return sample_bytes(logits, plan.temperature, plan.seed, plan.start)
    return Boundary(codec.encode(estimate), FEATURES.encode(features) if a.context == "chained" else b"")
