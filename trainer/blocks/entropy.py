"""Noise ranges of equal entropy: a symbol's entropy measured as a function of the noise on its code."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from stages.model.partition import NoisePartition, equal_entropy, equal_probability, uniform
from trainer.blocks.config import NoiseConfig

SAMPLES, LEAST_SAMPLES = 4096, 256
ODDS_AT_ONCE = 1 << 20  # logits held at a time: a large vocabulary gets fewer samples, but at least LEAST_SAMPLES
LEVELS = 48


class CodeTable(Protocol):
    """Codes of any alphabet."""

    @property
    def dim(self) -> int: ...

    def table(self) -> Tensor: ...


def make_partition(noise: NoiseConfig, blocks: int, codes: CodeTable, text: Tensor) -> NoisePartition:
    """The noise ranges that a config asks for; `equal_entropy` is measured on `text` (symbols,)."""
    # It is measured with the optimal context-free denoiser, so it needs no trained model, and workers that measure the
    # same text agree.
    if noise.partition == "equal_probability":
        return equal_probability(blocks, noise.sigma_min, noise.sigma_max, overlap=noise.overlap)
    if noise.partition == "uniform":
        return uniform(blocks, noise.sigma_min, noise.sigma_max, noise.overlap)
    sigmas, nats = entropy_curve(codes, text, noise.sigma_min, noise.sigma_max)
    measured = equal_entropy(blocks, sigmas, nats, noise.overlap)
    # Digits that depend on the machine or its threads are cut off, for two workers must get the same boundaries.
    inner = [float(f"{boundary:.6g}") for boundary in measured.boundaries[1:-1]]
    return replace(measured, boundaries=(noise.sigma_max, *inner, noise.sigma_min))


def entropy_curve(
    codes: CodeTable, text: Tensor, sigma_min: float, sigma_max: float
) -> tuple[list[float], list[float]]:
    """(sigmas, nats): the CE of the Bayes-optimal denoiser that knows how frequent symbols are and no context.

    text: (symbols,), whole numbers. Measured on a sample of it, at noise levels equally spaced in log sigma.
    """
    table = codes.table().double()
    prior = torch.bincount(text.long(), minlength=len(table)).double() + 1e-9
    log_prior = (prior / prior.sum()).log()
    generator = torch.Generator().manual_seed(0)
    samples = min(SAMPLES, max(ODDS_AT_ONCE // len(table), LEAST_SAMPLES))
    sample = text[torch.randint(len(text), (samples,), generator=generator)].long()
    eps = torch.randn(samples, codes.dim, generator=generator).double()
    sigmas = torch.logspace(math.log10(sigma_min), math.log10(sigma_max), LEVELS, dtype=torch.float64).tolist()
    sigmas[0], sigmas[-1] = sigma_min, sigma_max
    nats = []
    for sigma in sigmas:
        z = table[sample] + sigma * eps
        logits = z @ table.T / (sigma * sigma) + log_prior
        nats.append(float(torch.nn.functional.cross_entropy(logits, sample)))
    return sigmas, nats
