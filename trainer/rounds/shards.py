"""Which text a replica reads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import MAX_WHOLE
from trainer.data import Corpus


def replica_seed(seed: int, replica: int) -> int:
    """The seed of a replica's batches and noise: a pure function, so that any machine can take its place.

    Replica 0 has the run's own, so that a run of one replica is the training in one place.
    """
    if replica == 0:
        return seed
    word = hashlib.sha256(f"{seed} {replica}".encode()).digest()
    return int.from_bytes(word[:8], "little") % MAX_WHOLE


@dataclass(frozen=True)
class PooledCorpus(Corpus):
    """The text as one place sees it that stands for all replicas: their batches, one after the other, in each step."""

    replicas: int = 1

    def batch(self, seed: int, step: int, sequences: int, length: int) -> Tensor:
        """sequences: of all replicas together."""
        each = sequences // self.replicas
        batches = [Corpus.batch(self, replica_seed(seed, i), step, each, length) for i in range(self.replicas)]
        return torch.cat(batches)
