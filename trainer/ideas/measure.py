"""Cross-entropies window by window, so that two models can be compared on the same windows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.diagnostics import ROWS
from trainer.evaluation import bits

Measured = dict[str, Tensor]
"""Mean nats a byte of each window, (windows,), by what the model was told."""


@torch.inference_mode()
def window_nats(logits: Callable[[Tensor], Tensor], text: Tensor, skip: int) -> Tensor:
    """CE of each window from byte `skip` on, nats a byte.

    text: (windows, length + 1) int64; logits: makes (rows, length, 256) of some rows of it.
    """
    parts = []
    for row in range(0, len(text), ROWS):
        part = text[row : row + ROWS]
        scores = logits(part)[:, skip - 1 :].float()
        losses = F.cross_entropy(scores.transpose(1, 2), part[:, skip:], reduction="none")
        parts.append(losses.mean(dim=1))
    return torch.cat(parts)


def mean_losses(measured: Measured) -> dict[str, float]:
    """For a run's log."""
    return {f"valid_{name.replace(' ', '_')}_nats": float(nats.mean()) for name, nats in measured.items()}


def mean_bits(nats: Tensor) -> float:
    return bits(float(nats.mean()))


def gain_bits(without: Tensor, having: Tensor) -> tuple[float, float]:
    """What was gained on the same windows, bits a byte, and its standard error over windows."""
    gain = (without - having) / math.log(2)
    return float(gain.mean()), float(gain.std() / math.sqrt(len(gain))) if len(gain) > 1 else math.nan
