"""EDM noise maths: input scale, loss weight, Euler steps and the state formula.

Source: Karras et al. 2022 (EDM), table 1 and algorithm 1, as used by DiffusionBlocks (arXiv 2506.14202).
Notation: y is a byte's code, z = y + sigma * eps its noisy state, D the denoised point.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def input_scale(sigma: Tensor, data_std: float) -> Tensor:
    """c_in for a tensor of noise levels: makes the state's variance 1."""
    return torch.rsqrt(sigma * sigma + data_std * data_std)


def edm_weight(sigma: Tensor, data_std: float) -> Tensor:
    """EDM's loss weight (sigma^2 + sd^2) / (sigma sd)^2, one for each sample."""
    return (sigma * sigma + data_std * data_std) / (sigma * data_std) ** 2


def euler_step(z: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """One step of the probability-flow ODE from `sigma` down to `sigma_next`.

    z' = r z + (1 - r) D with r = sigma'/sigma. z, denoised: (..., code_dim).
    """
    ratio = sigma_next / sigma
    return ratio * z + (1 - ratio) * denoised


def step_sigmas(high: float, low: float, steps: int) -> list[float]:
    """`steps` + 1 noise levels from `high` to `low`, equally spaced in log sigma."""
    ratio = low / high
    return [high * ratio ** (i / steps) for i in range(steps)] + [low]


@dataclass(frozen=True)
class Trajectory:
    """The state of a sweep as (initial noise, estimate): z = a z0 + (1 - a) E, a = sigma / sigma_0.

    Euler steps are linear in z, so z0 can be regenerated from a seed and only E, a weighted mean of
    the denoised points so far, needs to travel.
    """

    sigma_start: float

    def state(self, initial: Tensor, estimate: Tensor, sigma: float) -> Tensor:
        """z at `sigma`. initial (z0), estimate (E): (..., code_dim)."""
        a = sigma / self.sigma_start
        return a * initial + (1 - a) * estimate

    def advance(self, estimate: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """E after the Euler step from `sigma` to `sigma_next` with denoised point D.

        From z' = r z + (1 - r) D: (1 - a') E' = r (1 - a) E + (1 - r) D.
        """
        ratio = sigma_next / sigma
        before, after = 1 - sigma / self.sigma_start, 1 - sigma_next / self.sigma_start
        return (ratio * before * estimate + (1 - ratio) * denoised) / after
