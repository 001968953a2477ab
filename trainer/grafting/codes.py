"""Codes for the symbols of a pretrained model: unit vectors, near where the model's own embeddings are near."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHITENING = 0.5
"""Power of the standard deviations that the principal directions are divided by: at 0 a few of them decide all, and
most symbols share a code; at 1 near symbols are no nearer than others."""


@dataclass(frozen=True)
class EmbeddingCodes:
    """A table of unit-norm codes, one for each symbol."""

    rows: Tensor
    """(vocabulary, dim) float32."""

    @classmethod
    def of_embedding(cls, embedding: Tensor, dim: int) -> EmbeddingCodes:
        """From the `dim` largest principal directions of an embedding (vocabulary, width).

        Computed on the CPU: a direction's sign is a matter of the device, and codes are stored once.
        """
        points = embedding.cpu().double()
        centred = points - points.mean(dim=0)
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
        variances, directions = variances.flip(0)[:dim], directions.flip(1)[:, :dim]
        points = centred @ directions / variances.clamp_min(1e-12) ** (WHITENING / 2)
        return cls((points / points.norm(dim=1, keepdim=True).clamp_min(1e-12)).float())

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    def table(self) -> Tensor:
        """(vocabulary, dim) float32, each row of norm 1."""
        return self.rows


def decoding(codes: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """The best linear way back from codes (vocabulary, dim) to embeddings (vocabulary, width), by least squares.

    Returns the matrix (width, dim) and the offset (width,), on the CPU: a training starts alike on every device.
    """
    known, wanted = codes.cpu().double(), embedding.cpu().double()
    centre, target = known.mean(dim=0), wanted.mean(dim=0)
    solution = torch.linalg.lstsq(known - centre, wanted - target).solution
    return solution.T.float(), (target - centre @ solution).float()
