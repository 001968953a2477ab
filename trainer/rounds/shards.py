"""Which text a replica reads."""

from __future__ import annotations

import hashlib

from trainer.config import MAX_WHOLE


def replica_seed(seed: int, replica: int) -> int:
    """The seed of a replica's batches and noise: a pure function, so that any machine can take its place.

    Replica 0 has the run's own, so that a run of one replica is the training in one place.
    """
    if replica == 0:
        return seed
    word = hashlib.sha256(f"{seed} {replica}".encode()).digest()
    return int.from_bytes(word[:8], "little") % MAX_WHOLE
