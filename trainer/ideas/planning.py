"""Plans of a chunk: what the chain's slots point to at sigma_end, from noised text or from pure noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.block import Block
from stages.noise import Trajectory, euler_step, step_sigmas
from stages.partition import NoisePartition
from stages.randomness import Purpose, normals
from trainer.evaluation import Memory, clean_features
from trainer.objectives import ChunkLayout

EulerStep = tuple[int, float, float]
"""Block, sigma before, sigma after."""


@dataclass(frozen=True)
class Planner:
    """A frozen chain that stops at a sigma_end of choice and says where its slots point: D, (batch, slots, code_dim).

    D and not the running estimate E is the plan. Of noised text, E would hold the text itself: z = a z0 + (1 - a) E.
    """

    blocks: list[Block]
    partition: NoisePartition
    steps: int
    """Euler steps in a whole block."""

    @property
    def scale(self) -> float:
        """Brings D's numbers to about 1 for a slot that is sure."""
        return 1 / self.blocks[0].data_std

    def euler_steps(self, high: float, low: float) -> Iterator[EulerStep]:
        """From `high` down to `low`, each block as densely as when it takes its whole range."""
        for block in range(len(self.blocks)):
            top, bottom = self.partition.range(block)
            span, (start, end) = math.log(top / bottom), (min(high, top), max(low, bottom))
            if start > end:
                count = max(1, round(self.steps * math.log(start / end) / span))
                yield from ((block, *pair) for pair in pairwise(step_sigmas(start, end, count)))

    def owner(self, sigma: float) -> int:
        """The block that evaluates at `sigma`: at a boundary, the earlier one, as for the last evaluation of a text."""
        return next((i for i, low in enumerate(self.partition.boundaries[1:]) if sigma >= low), len(self.blocks) - 1)

    @torch.no_grad()
    def of_text(self, text: Tensor, layout: ChunkLayout, sigma_end: float, rolled: float, eps: Tensor) -> Tensor:
        """Plans of true chunks: noised to `rolled` * sigma_end and denoised from there, given the true prefix.

        text: (batch, positions) int64; eps: (batch, positions, code_dim). With `rolled` 1 nothing is denoised, and the
        plan is what a perfect chain would have handed over. Above 1 it holds decisions of the chain too.
        """
        high = min(sigma_end * rolled, self.partition.sigma_max)
        memories, mask = self._memories(text), layout.mask()
        z = self.blocks[0].codes[text] + high * eps
        # as in training: the first evaluation is told the block's own first guess
        point = self._point(self.owner(high), memories, z, torch.zeros_like(z), high, 0, mask)
        for block, sigma, after in self.euler_steps(high, sigma_end):
            point = self._point(block, memories, z, point, sigma, 0, mask)
            z = euler_step(z, point, sigma, after)
        return self._point(self.owner(sigma_end), memories, z, point, sigma_end, 0, mask)

    @torch.no_grad()
    def from_noise(self, known: Tensor, slots: int, sigma_end: float, seed: int) -> Tensor:
        """Plans of the next `slots` bytes from pure noise. known: (batch, positions) int64.

        Row i goes the way of a sweep with seed `seed` + i.
        """
        start, a = known.shape[1], self.blocks[0].architecture
        memories = self._memories(known)
        trajectory = Trajectory(self.partition.sigma_max)
        rows = [normals(seed + i, Purpose.INITIAL_NOISE, start, slots, a.code_dim) for i in range(len(known))]
        initial = trajectory.sigma_start * torch.stack(rows)
        estimate = torch.zeros_like(initial)
        for block, sigma, after in self.euler_steps(trajectory.sigma_start, sigma_end):
            z = trajectory.state(initial, estimate, sigma)
            point = self._point(block, memories, z, estimate, sigma, start)
            estimate = trajectory.advance(estimate, point, sigma, after)
        z = trajectory.state(initial, estimate, sigma_end)
        return self._point(self.owner(sigma_end), memories, z, estimate, sigma_end, start)

    def _memories(self, known: Tensor) -> list[Memory]:
        return [memory for _, memory in clean_features(self.blocks, known)]

    def _point(
        self,
        index: int,
        memories: list[Memory],
        z: Tensor,
        estimate: Tensor,
        sigma: float,
        start: int,
        mask: Tensor | None = None,
    ) -> Tensor:
        block = self.blocks[index]
        logits = block.denoise(z, estimate, torch.full((1, 1), sigma), memories[index], start, mask)
        return block.point(logits)
