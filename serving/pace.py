"""How long the candidates of a sweep are, and how many.

About 2^KL candidates are needed for a chunk (Chatterjee and Diaconis 2018, arXiv 1511.01437), and KL grows with the
chunk's length: with too few, one candidate has all the weight and there is no choice. Where a chunk is borne easily, a
longer one saves trips.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.candidates import Weights
from stages.alphabet import BYTES, Alphabet
from stages.scoring import MAX_LOGITS, MAX_SCORED_ROWS, most_scored


@dataclass(frozen=True)
class Sizes:
    """What a request begins with, and the most that is taken without being asked for."""

    chunk: int
    candidates: int
    most_chunk: int
    most_candidates: int
    """Their hidden states travel from host to host."""
    rows: int = MAX_SCORED_ROWS
    """Symbols of all candidates of a sweep together."""
    coolness: float = 1.0
    """Temperature of the drafter, as a multiple of the request's."""


OF_BYTES = Sizes(chunk=32, candidates=32, most_chunk=96, most_candidates=64)
OF_TOKENS = Sizes(chunk=12, candidates=32, most_chunk=32, most_candidates=64, coolness=0.9)
"""A token is about four bytes. Eight would be as much text; with twelve, 128 tokens take eleven trips, less than a
tenth of those of `ar`. Small models of tokens give too much to the many unlikely ones: docs/decisions.md."""


def sizes_of(alphabet: Alphabet, width: int) -> Sizes:
    """Those for texts of these symbols, scored by a model of that width."""
    rows = most_scored(width)
    if alphabet == BYTES:
        return replace(OF_BYTES, rows=rows)
    room = MAX_LOGITS // alphabet.size  # in the drafter, which looks at the odds of every symbol after each of them
    few, most = (min(count, room) for count in (OF_TOKENS.candidates, OF_TOKENS.most_candidates))
    return replace(OF_TOKENS, candidates=few, most_candidates=most, rows=rows)


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

    def __init__(self, max_symbols: int, chunk: int | None, candidates: int | None, sizes: Sizes = OF_BYTES) -> None:
        """:param max_symbols: of the whole text.
        :param chunk, candidates: the user's, or None."""
        rows, self.sizes = sizes.rows, sizes
        self.chunk = self._first = min(chunk or min(sizes.chunk, rows // (candidates or sizes.candidates)), max_symbols)
        self.candidates = candidates or max(1, min(sizes.candidates, rows // self.chunk))
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
                self.candidates = min(2 * self.candidates, self.sizes.most_candidates, self.sizes.rows // self.chunk)
        elif effective > MANY * self.candidates and self._longer:
            self.chunk = min(self.chunk * 3 // 2, self.sizes.most_chunk, self.sizes.rows // self.candidates)
