"""A worker goes on at once from the last version, which lacks the round that it has just finished.

The naive delay that eager updates are measured against (arXiv 2502.12996).
"""

from __future__ import annotations

from trainer.rounds.overlap.none import Waiting


class Naive(Waiting):
    waits = False
