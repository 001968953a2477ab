"""A head that has no numbers of its own."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class TiedHead(nn.Module):
    """Multiplies with the embedding of the same stage, wherever that is moved or loaded: one matrix, stored once."""

    bias: None = None

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.__dict__["_embedding"] = embedding  # not as a module of this one: the numbers are the stage's

    @property
    def weight(self) -> Tensor:
        """(vocabulary, width)"""
        embedding: nn.Embedding = self.__dict__["_embedding"]
        return embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width) -> logits (..., vocabulary)."""
        return F.linear(x, self.weight)
