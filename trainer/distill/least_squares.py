"""Least squares of more rows than are held at a time."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # share of the mean square of what is known that keeps directions which hardly occur from being trusted


class LeastSquares:
    """argmin |X M - Y|^2 + r |M|^2 for a matrix M, in float64. The last columns of X may be free of the ridge r."""

    def __init__(self, known: int, wanted: int, free: int = 0, device: str | torch.device = "cpu") -> None:
        """known: columns of X; wanted: columns of Y; free: the last columns of X, which have no ridge."""
        self.free = free
        self.squares = torch.zeros(known, known, dtype=torch.float64, device=device)
        self.products = torch.zeros(known, wanted, dtype=torch.float64, device=device)

    def add(self, known: Tensor, wanted: Tensor) -> None:
        """More rows of X and Y: (rows, known) and (rows, wanted), float64."""
        self.squares += known.T @ known
        self.products += known.T @ wanted

    def solve(self) -> Tensor:
        """M: (known, wanted) float64."""
        squares = self.squares.diagonal()
        held = squares[: len(squares) - self.free]
        ridge = torch.zeros_like(squares)
        ridge[: len(held)] = RIDGE * held.mean()
        return torch.linalg.solve(self.squares + ridge.diag(), self.products)
