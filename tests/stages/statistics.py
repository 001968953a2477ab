"""Probabilities, and whether counts are what chance makes of them."""

import numpy as np
import torch
from numpy.typing import NDArray


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """The probability of counts that are at least as far off."""
    live = expected > 0
    assert counts[~live].sum() == 0
    statistic = ((counts[live] - expected[live]) ** 2 / expected[live]).sum()
    return float(torch.special.gammaincc(torch.tensor((live.sum() - 1) / 2), torch.tensor(statistic / 2)))


def probabilities(logits: torch.Tensor, temperature: float) -> NDArray[np.float64]:
    """Probabilities of all tokens: (rows, vocabulary)."""
    return (logits.double() / temperature).softmax(dim=-1).numpy()
