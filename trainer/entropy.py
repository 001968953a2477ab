"""How the entropy of a byte falls with the noise on its code: the measured curve behind `equal_entropy`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.codes import Codes

SAMPLES = 4096
LEVELS = 48


def entropy_curve(codes: Codes, text: Tensor, sigma_min: float, sigma_max: float) -> tuple[list[float], list[float]]:
    """(sigmas, nats): the CE of the Bayes-optimal denoiser that knows byte frequencies and no context.

    text: (bytes,) uint8. Measured on a sample of it, at noise levels equally spaced in log sigma.
    """
    table = codes.table()
    prior = torch.bincount(text.long(), minlength=len(table)).double() + 1e-9
    log_prior = (prior / prior.sum()).log().float()
    generator = torch.Generator().manual_seed(0)
    sample = text[torch.randint(len(text), (SAMPLES,), generator=generator)].long()
    eps = torch.randn(SAMPLES, codes.dim, generator=generator)
    sigmas = torch.logspace(math.log10(sigma_min), math.log10(sigma_max), LEVELS, dtype=torch.float64).tolist()
    sigmas[0], sigmas[-1] = sigma_min, sigma_max
    nats = []
    for sigma in sigmas:
        z = table[sample] + sigma * eps
        logits = z @ table.T / (sigma * sigma) + log_prior
        nats.append(float(torch.nn.functional.cross_entropy(logits, sample)))
    return sigmas, nats
