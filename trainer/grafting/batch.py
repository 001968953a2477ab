"""One block's batch in a step of training, its losses under a frozen head, and those of held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.stages.grafting.block import GraftBlock, GraftHead, Memory, Noisy, StateLikelihood, first_of_chunks
from onesweep.stages.model.partition import NoisePartition
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.diagnostics import scrambled
from onesweep.trainer.blocks.losses import ChunkLayout
from onesweep.trainer.blocks.task import draw_chunks
from onesweep.trainer.grafting.model import GraftModel


def head_losses(head: GraftHead, hidden: Tensor, target: Tensor, likelihood: StateLikelihood | None = None) -> Tensor:
    """Cross-entropy of each position in nats: (positions,). Carries gradient to `hidden` only.

    hidden: (positions, width), normed; target: (positions,) int64.
    """
    found: Tensor = _Losses.apply(hidden, head, target, likelihood)
    return found


class _Losses(torch.autograd.Function):
    """The head is frozen, so its gradient can be taken at once, while a piece's odds are there."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        head: GraftHead,
        target: Tensor,
        likelihood: StateLikelihood | None,
    ) -> Tensor:
        nats, gradients = [], []
        for rows, logits in head.pieces(hidden, likelihood):
            odds = logits.log_softmax(dim=1)
            index = target[rows, None]
            nats.append(-odds.gather(1, index)[:, 0])
            if ctx.needs_input_grad[0]:
                change = odds.exp_()
                change.scatter_add_(1, index, -torch.ones_like(index, dtype=change.dtype))
                gradients.append((change.to(head.weight.dtype) @ head.weight).to(hidden.dtype))
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(nats)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0][:, None].to(gradient.dtype), None, None, None


def read_all(blocks: Sequence[GraftBlock], tokens: Tensor) -> tuple[Tensor, list[Memory]]:
    """The clean stream through `blocks`, the first of which is block 0: its features after the last, and memories.

    Without blocks the features are the tokens themselves.
    """
    x, memories = tokens, []
    for block in blocks:
        x, memory = block.read(x)
        memories.append(memory)
    return x, memories


def roll(
    blocks: Sequence[GraftBlock],
    memories: Sequence[Memory],
    entered: Tensor,
    noisy: Noisy,
    levels: Sequence[Tensor],
    noise: Sequence[Tensor],
    head: GraftHead | None,
) -> tuple[Tensor, Tensor]:
    """Features and estimate of the slots from the blocks before, whose states have more noise.

    levels: sigma of each block, (batch, slots), falling from block to block; noise: standard normal, shaped as
    `noisy.z`, that of the last block first; head: None for no estimate.
    """
    # The noisier states are made from `noisy.z` by adding noise, so that they hold nothing about the text that it does
    # not hold: otherwise the blocks could learn to combine two states into the answer.
    states, z, sigma = [], noisy.z, noisy.sigma
    for level, added in zip(reversed(levels), noise, strict=True):
        level = torch.maximum(level, sigma)
        more = (level**2 - sigma**2).clamp_min(0).sqrt()[..., None]
        z = z + more * added
        sigma = level
        states.append((z, sigma))
    features, estimate = entered, torch.zeros_like(noisy.z)
    for block, memory, (z, sigma) in zip(blocks, memories, reversed(states), strict=True):
        there = replace(noisy, z=z, sigma=sigma, estimate=estimate)
        features = block.denoise(features, there, memory)
        if head is not None:
            estimate = block.point(features, there, head)
    return features, estimate


def levels_before(partition: NoisePartition, index: int, shares: Tensor) -> list[Tensor]:
    """A noise level for each block before `index`, drawn from its range.

    shares: uniform numbers, (index, batch, slots); log sigma is uniform in each block's range.
    """
    found = []
    for block in range(index):
        high, low = partition.range(block)
        found.append(torch.exp(math.log(low) + shares[block] * math.log(high / low)))
    return found


@dataclass(frozen=True)
class SlotBatch:
    """Chunks and noise of one block in one step: a pure function of (seed, block, step)."""

    # All of it is drawn on the CPU and moved once, so that it is the same on every device.

    chunk: int  # slots in a chunk
    with_estimate: bool  # true if slots see an estimate, made by the blocks before, or in block 0 by itself
    first: Tensor
    mask: Tensor  # as in Noisy
    sigma: Tensor  # (batch, slots)
    levels: list[Tensor]  # noise levels of the blocks before, from `levels_before`
    # Noise of the slots' states, then that added for each block before, the last of them first: (batch, slots,
    # code_dim).
    noise: list[Tensor]

    @classmethod
    def draw(
        cls,
        index: int,
        partition: NoisePartition,
        config: TrainingConfig,
        step: int,
        batch: int,
        device: torch.device | None = None,
    ) -> SlotBatch:
        """For windows of `config.architecture.context_length` slots."""
        a = config.architecture
        layout, generator, with_estimate = draw_chunks(config, index, a.context_length, step)
        where = layout.indices()
        uniform = torch.rand(index + 1, batch, int(where[-1]) + 1, generator=generator)[..., where]
        sigma = partition.sample(index, uniform[0])
        levels = levels_before(partition, index, uniform[1:])
        drawn = cls.of(layout, sigma, levels, a.code_dim, generator, device)
        return replace(drawn, with_estimate=with_estimate)

    @classmethod
    def of(
        cls,
        layout: ChunkLayout,
        sigma: Tensor,
        levels: Sequence[Tensor],
        code_dim: int,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> SlotBatch:
        """A batch with an estimate; `generator` draws the noise."""
        noise = [torch.randn(*sigma.shape, code_dim, generator=generator) for _ in range(1 + len(levels))]
        first, mask = first_of_chunks(layout.indices()).to(device), layout.mask().to(device)
        placed = [[tensor.to(device) for tensor in tensors] for tensors in (levels, noise)]
        return cls(layout.chunk, True, first, mask, sigma.to(device), *placed)

    def noisy(self, codes: Tensor, target: Tensor) -> Noisy:
        """Noisy states of `target` (batch, slots) int64."""
        z = codes[target] + self.sigma[..., None] * self.noise[0]
        return Noisy(z, torch.zeros_like(z), self.sigma, self.first, self.mask)


@dataclass(frozen=True)
class CleanPass:
    """The clean stream of a step."""

    known: Tensor  # the symbols that were read: (batch, length) int64
    before: list[Memory]  # keys and values of the blocks before
    memory: Memory  # keys and values of the block itself
    clean: Tensor  # features after it: (batch, length, width)


def read(block: GraftBlock, before: Sequence[GraftBlock], known: Tensor) -> CleanPass:
    """The clean stream through `before`, frozen, and `block`. known: (batch, length) int64."""
    with torch.no_grad():
        source, memories = read_all(before, known)
    clean, memory = block.read(source)
    return CleanPass(known, memories, memory, clean)


def slot_losses(
    block: GraftBlock,
    before: Sequence[GraftBlock],
    head: GraftHead,
    batch: SlotBatch,
    reading: CleanPass,
    target: Tensor,
) -> Tensor:
    """Cross-entropy in nats of the slots after every position that was read: (batch, length).

    target: the symbols after those, (batch, length) int64.
    """
    noisy, memory = batch.noisy(head.codes, target), reading.memory
    with torch.no_grad():
        entered = (before[0] if before else block).enter(reading.known, noisy.first)
        there = head if batch.with_estimate else None
        features, estimate = roll(before, reading.before, entered, noisy, batch.levels, batch.noise[1:], there)
        if batch.with_estimate and not before:
            estimate = block.point(block.denoise(features, noisy, memory), noisy, head)
    noisy = replace(noisy, estimate=estimate)
    hidden = block.added.way_out(block.denoise(features, noisy, memory))
    return head_losses(head, hidden.flatten(0, 1), target.flatten(), noisy.likelihood()).view(target.shape)


CHUNK = 16  # slots in a chunk, for measurements of slots that see each other
ROWS = 4  # windows at a time


@torch.inference_mode()
def next_nats(model: GraftModel, text: Tensor) -> float:
    """The clean stream's loss through all stages as they are. text: (windows, length + 1) int64."""
    total = 0.0
    for part in text.split(ROWS):
        x = part[:, :-1]
        for stage in model.stages:
            x = stage.read(x)
        logits = model.stages[-1].next_byte(x)
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / text[:, 1:].numel()


@torch.inference_mode()
def range_nats(model: GraftModel, index: int, text: Tensor) -> dict[str, float]:
    """Loss of a block's slots from true states, in chunks of CHUNK: at the most, the middle and the least noise of its
    range; at the most also with every position a chunk of its own, and in chunks with a prefix of another window.

    text: (windows, length + 1) int64.
    """
    block, before, (high, low) = model.blocks[index], model.blocks[:index], model.partition.range(index)
    levels = {
        "high": (high, CHUNK),
        "middle": ((high * low) ** 0.5, CHUNK),
        "low": (low, CHUNK),
        "high_alone": (high, 1),
    }
    totals = dict.fromkeys([*levels, "high_scrambled"], 0.0)
    prefixes = scrambled(text[:, :-1])
    for row, (part, prefix) in enumerate(zip(text.split(ROWS), prefixes.split(ROWS), strict=True)):
        known, target = part[:, :-1], part[:, 1:]
        reading = read(block, before, known)
        for name, (sigma, chunk) in levels.items():
            batch = _steady(model, index, target.shape, sigma, chunk, row)
            totals[name] += float(slot_losses(block, before, model.head, batch, reading, target).sum())
        wrong, batch = read(block, before, prefix), _steady(model, index, target.shape, high, CHUNK, row)
        totals["high_scrambled"] += float(slot_losses(block, before, model.head, batch, wrong, target).sum())
    return {f"{name}_nats": total / text[:, 1:].numel() for name, total in totals.items()}


def _steady(model: GraftModel, index: int, shape: torch.Size, sigma: float, chunk: int, row: int) -> SlotBatch:
    """One noise level everywhere, and the middle of their range for the blocks before."""
    levels = levels_before(model.partition, index, torch.full((index, *shape), 0.5))
    layout, generator = ChunkLayout(shape[1], chunk), torch.Generator().manual_seed(row)
    code_dim = model.architecture.code_dim
    return SlotBatch.of(layout, torch.full(shape, sigma), levels, code_dim, generator, model.device)
