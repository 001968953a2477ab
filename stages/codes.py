"""Codes: the fixed unit vector that stands for a byte in the noisy state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stages.architecture import VOCABULARY
from stages.randomness import Purpose, raw_words


@dataclass(frozen=True)
class Codes:
    """A table of unit-norm codes made from a seed.

    Entries are drawn as 16-bit integers and divided by an integer norm: every machine gets the same bits, so the
    digest in a manifest can be held exactly.
    """

    seed: int
    dim: int

    def table(self) -> Tensor:
        """(256, dim) float32, each row of norm 1."""
        words = raw_words(self.seed, Purpose.CODES, 0, VOCABULARY, self.dim)
        integers = (words >> np.uint64(48)).astype(np.int64) * 2 - 65535
        norms = np.sqrt((integers * integers).sum(axis=1, dtype=np.int64).astype(np.float64))
        return torch.from_numpy((integers / norms[:, None]).astype(np.float32))

    def digest(self) -> str:
        """SHA-256 of the table's little-endian float32 bytes."""
        return hashlib.sha256(self.table().numpy().astype("<f4").tobytes()).hexdigest()
