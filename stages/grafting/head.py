"""The pretrained model's head beside the codes of its symbols, read a few positions at a time: all odds at once would
fill the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64
"""Positions on a processor, whose cache holds few odds."""
GPU_BYTES = 256 << 20
"""Of odds in float32 on a GPU, which wants large products; about four times as much is in use."""


def rows_at_once(device: torch.device, vocabulary: int) -> int:
    """Positions whose odds are held at a time."""
    return ROWS if device.type == "cpu" else max(ROWS, GPU_BYTES // (4 * vocabulary))


@dataclass(frozen=True)
class Evidence:
    """What noisy states say about their own symbols: log likelihood z . code / sigma^2, for codes have equal norms."""

    z: Tensor
    """(positions, code_dim)"""
    sigma: Tensor
    """(positions, 1)"""

    def at(self, rows: slice, codes: Tensor) -> Tensor:
        """(rows, vocabulary)"""
        return (self.z[rows] / self.sigma[rows] ** 2) @ codes.T


@dataclass(frozen=True)
class Head:
    weight: Tensor
    """(vocabulary, width), float32 or bfloat16."""
    codes: Tensor
    """(vocabulary, code_dim)"""
    bias: Tensor | None = None
    """(vocabulary,)"""

    def logits(self, hidden: Tensor, evidence: Evidence | None = None) -> Tensor:
        """(positions, vocabulary) float32 from normed features (positions, width)."""
        return torch.cat([piece for _, piece in self.pieces(hidden, evidence)])

    @torch.no_grad()
    def points(self, hidden: Tensor, evidence: Evidence, temperature: float = 1.0) -> Tensor:
        """Denoised points softmax(logits) @ codes: (positions, code_dim)."""
        pieces = self.pieces(hidden, evidence)
        return torch.cat([(logits / temperature).softmax(dim=1) @ self.codes for _, logits in pieces])

    def pieces(self, hidden: Tensor, evidence: Evidence | None) -> Iterator[tuple[slice, Tensor]]:
        """Logits of some positions after the other, and which they are."""
        count = rows_at_once(hidden.device, len(self.weight))
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), count):
                rows = slice(begin, begin + count)
                logits = (hidden[rows].to(self.weight.dtype) @ self.weight.T).float()
                if self.bias is not None:
                    logits += self.bias
                if evidence is not None:
                    logits += evidence.at(rows, self.codes)
                yield rows, logits
