"""What a graft is worth, on held-out text, in nats a token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.grafting.block import first_of_chunks
from trainer.diagnostics import scrambled
from trainer.evaluation import PathPoint
from trainer.grafting.chain import levels_before, read_all
from trainer.grafting.lesson import Lesson, read, slot_losses
from trainer.grafting.losses import losses
from trainer.grafting.model import GraftModel
from trainer.grafting.sweep import Start, evaluations
from trainer.objectives import ChunkLayout

CHUNK = 16
"""Slots in a chunk, where slots that see each other are measured."""
ROWS = 4
"""Windows at a time."""


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
            lesson = _steady(model, index, target.shape, sigma, chunk, row)
            totals[name] += float(slot_losses(block, before, model.head, lesson, reading, target).sum())
        wrong, lesson = read(block, before, prefix), _steady(model, index, target.shape, high, CHUNK, row)
        totals["high_scrambled"] += float(slot_losses(block, before, model.head, lesson, wrong, target).sum())
    return {f"{name}_nats": total / text[:, 1:].numel() for name, total in totals.items()}


def _steady(model: GraftModel, index: int, shape: torch.Size, sigma: float, chunk: int, row: int) -> Lesson:
    """One noise level everywhere, and the middle of their range for the blocks before."""
    levels = levels_before(model.partition, index, torch.full((index, *shape), 0.5))
    layout, generator = ChunkLayout(shape[1], chunk), torch.Generator().manual_seed(row)
    code_dim = model.architecture.code_dim
    return Lesson.of(layout, torch.full(shape, sigma), levels, code_dim, generator, model.device)


@torch.inference_mode()
def from_noise(model: GraftModel, text: Tensor, steps: int, chunk: int, *, is_scrambled: bool) -> list[PathPoint]:
    """Loss of each token while its slot is denoised from pure noise, an evaluation a point.

    text: (windows, length + 1) int64; steps: Euler steps a block; chunk: positions that are denoised together; at 1
    every slot has the true prefix, the papers' metric (BlockTrain, arXiv 2606.24722).
    """
    known, target = text[:, :-1], text[:, 1:]
    prefix = scrambled(known) if is_scrambled else known
    layout = ChunkLayout(known.shape[1], chunk)
    first, mask = first_of_chunks(layout.indices()).to(model.device), layout.mask().to(model.device)
    _, memories = read_all(model.blocks, prefix)
    start = Start(model.blocks[0].enter(prefix, first), memories, first, mask)
    path = []
    for found in evaluations(model, start, steps, "ode"):
        rows = found.hidden.flatten(0, 1)
        nats = losses(model.head, rows, target.flatten(), found.noisy.evidence())
        path.append(PathPoint(found.sigma, float(nats.mean())))
    return path
