"""A sweep through grafted blocks in one process: from noise to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.alphabet import Alphabet
from stages.ar import new_caches
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.codec import Int8
from stages.grafting.block import Memory, Noisy
from stages.noise import step_sigmas
from stages.samplers import DEFAULT_SAMPLER, SAMPLERS
from stages.sweep import BlockWork, Boundary, SweepPlan, run_alone
from trainer.grafting.model import GraftModel


@dataclass(frozen=True)
class Start:
    """What slots have before the first evaluation."""

    entered: Tensor
    """(batch, slots, width), of `GraftBlock.enter`."""
    memories: Sequence[Memory]
    """Of every block's clean stream."""
    first: Tensor
    mask: Tensor
    """As in Noisy."""
    position: int = 0


@dataclass(frozen=True)
class Evaluation:
    """One of a sweep's."""

    sigma: float
    noisy: Noisy
    hidden: Tensor
    """What the head reads: (batch, slots, width)."""


def evaluations(
    model: GraftModel, start: Start, steps: int, sampler: str = DEFAULT_SAMPLER, temperature: float = 1.0, seed: int = 0
) -> Iterator[Evaluation]:
    """All evaluations of a sweep, `steps` in each block and one more at sigma_min, where the text is read out.

    The sampler works on the CPU, as on hosts.
    """
    batch, slots, _ = start.entered.shape
    dim = model.head.codes.shape[1]
    made = SAMPLERS[sampler](seed, start.position, batch * slots, dim, model.partition.sigma_max, temperature)
    features, estimate = start.entered, torch.zeros(batch, slots, dim)
    count = 0
    for block, memory in zip(model.blocks, start.memories, strict=True):
        high, low = model.partition.range(block.index)
        levels: list[tuple[float, float | None]] = list(pairwise(step_sigmas(high, low, steps)))
        if block is model.blocks[-1]:
            levels.append((low, None))
        out = features
        for sigma, sigma_next in levels:
            z = made.state(estimate.flatten(0, 1), sigma, count).view(estimate.shape)
            there = torch.full((batch, slots), sigma, device=model.device)
            placed = z.to(model.device), estimate.to(model.device)
            noisy = Noisy(*placed, there, start.first, start.mask, start.position)
            out = block.denoise(features, noisy, memory)
            yield Evaluation(sigma, noisy, block.added.way_out(out))
            if sigma_next is not None:
                point = block.point(out, noisy, model.head, made.point_temperature).flatten(0, 1).cpu()
                estimate = made.advance(estimate.flatten(0, 1), point, sigma, sigma_next).view(estimate.shape)
            count += 1
        features = out


def write(
    model: GraftModel,
    prompt: Sequence[int],
    count: int,
    chunk: int,
    *,
    steps: int = 4,
    sampler: str = DEFAULT_SAMPLER,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """`count` symbols after `prompt`, `chunk` of them a sweep: as hosts write them, by the same code."""
    a, alphabet = model.architecture, Alphabet(model.architecture.vocabulary)
    backend = backend_named(DEFAULT_BACKEND)
    runners = [backend.block(part) for part in model.parts()]
    caches = [new_caches(a.layers_in(i), a, len(prompt) + count, device=model.device) for i in range(a.parts)]
    clean, written, read = alphabet.encode(list(prompt)), list[int](), 0
    while len(written) < count:
        read += alphabet.count(clean)
        plan = SweepPlan(seed, read, min(chunk, count - len(written)), steps, temperature, sampler)
        outcome: Boundary | bytes | None = None
        for index, runner in enumerate(runners):
            assert not isinstance(outcome, bytes)
            work = BlockWork(a, index, model.partition, caches[index], plan, Int8(), clean, outcome)
            outcome = run_alone(work, runner)
        assert isinstance(outcome, bytes)
        clean, written = outcome, written + alphabet.symbols(outcome)
    return written
