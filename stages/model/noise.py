"""EDM noise maths: input scale, loss weight and the noise levels of a sweep.

Source: Karras et al. 2022 (EDM), table 1 and algorithm 1, as used by DiffusionBlocks (arXiv 2506.14202).
"""

from __future__ import annotations

import torch
from torch import Tensor


def input_scale(sigma: Tensor, data_std: float) -> Tensor:
    """c_in for a tensor of noise levels: makes the state's variance 1."""
    return torch.rsqrt(sigma * sigma + data_std * data_std)


def edm_weight(sigma: Tensor, data_std: float) -> Tensor:
    """EDM's loss weight (sigma^2 + sd^2) / (sigma sd)^2, one for each sample."""
    return (sigma * sigma + data_std * data_std) / (sigma * data_std) ** 2


def step_sigmas(high: float, low: float, steps: int) -> list[float]:
    """`steps` + 1 noise levels from `high` to `low`, equally spaced in log sigma."""
    ratio = low / high
    return [high * ratio ** (i / steps) for i in range(steps)] + [low]
