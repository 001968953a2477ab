"""How the entropy of a byte falls with the noise on its code, and the noise ranges that follow from it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from stages.codes import Codes
from stages.partition import NoisePartition, equal_entropy, equal_probability, uniform
from trainer.config import NoiseConfig

SAMPLES = 4096
LEVELS = 48


def make_partition(noise: NoiseConfig, blocks: int, codes: Codes, text: Tensor) -> NoisePartition:
    """The noise ranges that a config asks for; `equal_entropy` is measured on `text` (bytes,) uint8."""
    if noise.partition == "equal_probability":
        return equal_probability(blocks, noise.sigma_min, noise.sigma_max, overlap=noise.overlap)
    if noise.partition == "uniform":
        return uniform(blocks, noise.sigma_min, noise.sigma_max, noise.overlap)
    sigmas, nats = entropy_curve(codes, text, noise.sigma_min, noise.sigma_max)
    measured = equal_entropy(blocks, sigmas, nats, noise.overlap)
    # no digits that depend on the machine or its threads: workers that measure the same text agree
    inner = [float(f"{boundary:.6g}") for boundary in measured.boundaries[1:-1]]
    return replace(measured, boundaries=(noise.sigma_max, *inner, noise.sigma_min))


def entropy_curve(codes: Codes, text: Tensor, sigma_min: float, sigma_max: float) -> tuple[list[float], list[float]]:
    """(sigmas, nats): the CE of the Bayes-optimal denoiser that knows byte frequencies and no context.

    text: (bytes,) uint8. Measured on a sample of it, at noise levels equally spaced in log sigma.
    """
    table = codes.table().double()
    prior = torch.bincount(text.long(), minlength=len(table)).double() + 1e-9
    log_prior = (prior / prior.sum()).log()
    generator = torch.Generator().manual_seed(0)
    sample = text[torch.randint(len(text), (SAMPLES,), generator=generator)].long()
    eps = torch.randn(SAMPLES, codes.dim, generator=generator).double()
    sigmas = torch.logspace(math.log10(sigma_min), math.log10(sigma_max), LEVELS, dtype=torch.float64).tolist()
    sigmas[0], sigmas[-1] = sigma_min, sigma_max
    nats = []
    for sigma in sigmas:
        z = table[sample] + sigma * eps
        logits = z @ table.T / (sigma * sigma) + log_prior
        nats.append(float(torch.nn.functional.cross_entropy(logits, sample)))
    return sigmas, nats
