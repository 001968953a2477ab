"""What one block is asked in one step of training, and its losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.grafting.block import GraftBlock, Memory, Noisy, first_of_chunks
from stages.grafting.head import Head
from stages.partition import NoisePartition
from stages.randomness import Purpose, uniforms
from trainer.config import TrainingConfig
from trainer.grafting.chain import levels_before, read_all, roll
from trainer.grafting.losses import losses
from trainer.objectives import ChunkLayout


@dataclass(frozen=True)
class Lesson:
    """A pure function of (seed, block, step), whatever the device: all of it is drawn on the CPU, and moved once."""

    chunk: int
    """Slots in a chunk."""
    with_estimate: bool
    """Whether slots see what was made of them before, by the blocks before, or in block 0 by itself."""
    first: Tensor
    mask: Tensor
    """As in Noisy."""
    sigma: Tensor
    """(batch, slots)"""
    levels: list[Tensor]
    """Of the blocks before: see `levels_before`."""
    noise: list[Tensor]
    """Of the slots' states, then what each block before has more, the last of them first: (batch, slots, code_dim)."""

    @classmethod
    def draw(
        cls,
        index: int,
        partition: NoisePartition,
        config: TrainingConfig,
        step: int,
        batch: int,
        device: torch.device | None = None,
    ) -> Lesson:
        """For windows of `config.architecture.context_bytes` slots."""
        length = config.architecture.context_bytes
        draws = uniforms(config.seed, Purpose.TRAINING, 1 + index, 1, 4, step)[0]
        generator = torch.Generator().manual_seed(int(draws[0] * 2**53))
        chunk = config.chunks[int(draws[1] * len(config.chunks)) % len(config.chunks)] or length
        layout = ChunkLayout(length, chunk, int(draws[2] * chunk) % chunk)
        where = layout.indices()
        uniform = torch.rand(index + 1, batch, int(where[-1]) + 1, generator=generator)[..., where]
        sigma = partition.sample(index, uniform[0])
        levels = levels_before(partition, index, uniform[1:])
        lesson = cls.of(layout, sigma, levels, config.architecture.code_dim, generator, device)
        return replace(lesson, with_estimate=bool(draws[3] <= config.self_condition))

    @classmethod
    def of(
        cls,
        layout: ChunkLayout,
        sigma: Tensor,
        levels: Sequence[Tensor],
        code_dim: int,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> Lesson:
        """With an estimate. :param generator: of the noise."""
        noise = [torch.randn(*sigma.shape, code_dim, generator=generator) for _ in range(1 + len(levels))]
        first, mask = first_of_chunks(layout.indices()).to(device), layout.mask().to(device)
        placed = [[tensor.to(device) for tensor in drawn] for drawn in (levels, noise)]
        return cls(layout.chunk, True, first, mask, sigma.to(device), *placed)

    def noisy(self, codes: Tensor, target: Tensor) -> Noisy:
        """Noisy states of `target` (batch, slots) int64."""
        z = codes[target] + self.sigma[..., None] * self.noise[0]
        return Noisy(z, torch.zeros_like(z), self.sigma, self.first, self.mask)


@dataclass(frozen=True)
class Reading:
    """The clean stream's part of a step."""

    known: Tensor
    """What was read: (batch, length) int64."""
    before: list[Memory]
    """Of the blocks before."""
    memory: Memory
    """Of the block itself."""
    clean: Tensor
    """Features after it: (batch, length, width)."""


def read(block: GraftBlock, before: Sequence[GraftBlock], known: Tensor) -> Reading:
    """known: (batch, length) int64; before: the blocks before, frozen."""
    with torch.no_grad():
        source, memories = read_all(before, known)
    clean, memory = block.read(source)
    return Reading(known, memories, memory, clean)


def slot_losses(
    block: GraftBlock, before: Sequence[GraftBlock], head: Head, lesson: Lesson, reading: Reading, target: Tensor
) -> Tensor:
    """Cross-entropy in nats of the slots after every position that was read: (batch, length).

    target: the symbols after those, (batch, length) int64.
    """
    noisy, memory = lesson.noisy(head.codes, target), reading.memory
    with torch.no_grad():
        entered = (before[0] if before else block).enter(reading.known, noisy.first)
        there = head if lesson.with_estimate else None
        features, estimate = roll(before, reading.before, entered, noisy, lesson.levels, lesson.noise[1:], there)
        if lesson.with_estimate and not before:
            estimate = block.point(block.denoise(features, noisy, memory), noisy, head)
    noisy = replace(noisy, estimate=estimate)
    hidden = block.added.way_out(block.denoise(features, noisy, memory))
    return losses(head, hidden.flatten(0, 1), target.flatten(), noisy.evidence()).view(target.shape)
