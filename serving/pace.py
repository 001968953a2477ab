"""How long the candidates of a sweep are, and how many.

About 2^KL candidates are needed for a chunk (Chatterjee and Diaconis 2018, arXiv 1511.01437), and KL grows with the
chunk's length: with too few, one candidate has all the weight and there is no choice. Where a chunk is borne easily, a
longer one saves trips.
"""

from __future__ import annotations

from serving.candidates import Weights
from stages.scoring import MAX_SCORED_ROWS

CHUNK = 32
CANDIDATES = 32
MAX_CHUNK = 96
MAX_CANDIDATES = 64
"""Most that are taken without being asked for: their hidden states travel from host to host."""
LOOK = 2
"""Sweeps with the same numbers before they are judged: one alone says little."""
FEW = 1.2
"""With fewer effective candidates than this, there should have been more."""
MANY = 0.25
"""With a larger share of effective candidates than this, a chunk can be longer."""


class Pace:
    """Chunk and candidates of each sweep of one request.

    What the user gave stays as it is. The rest starts from the defaults and follows the weights that the request itself
    has seen, and nothing else: the same request gives the same text on any replica. Chunks never get shorter than the
    first, so there are never more trips than with it.
    """

    def __init__(self, max_bytes: int, chunk: int | None, candidates: int | None) -> None:
        """:param max_bytes: of the whole text.
        :param chunk, candidates: the user's, or None."""
        rows = MAX_SCORED_ROWS
        self.chunk = self._first = min(chunk or min(CHUNK, rows // (candidates or CANDIDATES)), max_bytes)
        self.candidates = candidates or max(1, min(CANDIDATES, rows // self.chunk))
        self._longer, self._more = chunk is None, candidates is None
        self._effective = list[float]()

    def learn(self, weights: Weights) -> None:
        """Book a sweep's weights."""
        self._effective.append(weights.effective)
        if len(self._effective) == LOOK:
            self._judge(sum(self._effective) / LOOK)
            self._effective = []

    def _judge(self, effective: float) -> None:
        if effective < FEW:
            if self.chunk > self._first:
                self.chunk = max(self._first, self.chunk * 2 // 3)
            elif self._more:
                self.candidates = min(2 * self.candidates, MAX_CANDIDATES, MAX_SCORED_ROWS // self.chunk)
        elif effective > MANY * self.candidates and self._longer:
            self.chunk = min(self.chunk * 3 // 2, MAX_CHUNK, MAX_SCORED_ROWS // self.candidates)
