"""Rotary angles of pretrained models."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.llama.architecture import LlamaArchitecture, RopeScaling


def rotary_frequencies(architecture: LlamaArchitecture) -> Tensor:
    """Angle by which each pair of a head turns from one position to the next: (head_dim / 2,) float32.

    In float32, step by step as in the code that such models are trained with: over thousands of positions, what is
    rounded here adds up to more than all other rounding.
    """
    a = architecture
    frequency = 1 / a.rope_theta ** (torch.arange(0, a.head_dim, 2, dtype=torch.float32) / a.head_dim)
    return frequency if a.rope_scaling is None else frequency / stretch(frequency, a.rope_scaling)


def stretch(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """By what Llama 3 divides each frequency: from 1 for fast ones to `factor` for slow ones.

    Source: `apply_scaling` of the Llama 3.1 reference code.
    """
    s = scaling
    turns = s.original_positions * frequency / (2 * math.pi)  # within the context that the model was first trained for
    share = (turns - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)
    share = share.clamp(0, 1)
    return 1 / ((1 - share) / s.factor + share)


def llama_rotary(architecture: LlamaArchitecture) -> Tensor:
    """cos and sin for `layers.rotate`: (2, positions, head_dim / 2) float32."""
    a = architecture
    if torch.get_default_device().type == "meta":  # as in rotary_table
        return torch.empty(2, a.positions, a.head_dim // 2)
    angle = (torch.arange(a.positions, dtype=torch.float32)[:, None] * rotary_frequencies(a)).double()
    return torch.stack([angle.cos(), angle.sin()]).float()
