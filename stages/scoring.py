"""What a model says about symbols that it is given: scores of candidates, and verdicts on guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stages.randomness import Purpose, uniforms

MAX_CANDIDATES = 256
"""Continuations in a step."""
MAX_SCORED_ROWS = 4096
"""Symbols of all candidates of a step together: what a message, and a host's memory for one hop, have room for."""
BRANCH_ROWS = 256
"""Candidates are evaluated in pieces of about so many rows, so that they hold up nobody."""
MAX_LOGITS = 1 << 24
"""Numbers that a head may give at once: rows, of a vocabulary each. 64 MB."""
HEAD_LOGITS = 1 << 22
"""Of candidates it gives about so many at once."""
MAX_VERDICT = 4096
"""Symbols whose odds a verdict may tell: 16 KB, about what one flight carries on a link that was idle."""
IMPOSSIBLE_NATS = -1e30
"""What stands for ln 0: finite in float32, as are sums of it."""


@dataclass(frozen=True)
class Verdict:
    """How far guesses were accepted."""

    accepted: int
    probabilities: NDArray[np.float64]
    """Of the symbol after the accepted ones: (vocabulary,)"""


def log_probabilities(logits: Tensor, temperature: float) -> NDArray[np.float64]:
    """ln of what each symbol's probability is at `temperature`; at 0 it is 0 for the argmax. (rows, vocabulary), as
    `logits`.

    Nothing is below IMPOSSIBLE_NATS.
    """
    scores = logits.detach().double().cpu().numpy()
    if temperature <= 0:
        nats = np.full_like(scores, IMPOSSIBLE_NATS)
        np.put_along_axis(nats, scores.argmax(axis=1)[:, None], 0.0, axis=1)
        return nats
    with np.errstate(over="ignore"):  # relative to the best, as in sample_symbols
        scores = (scores - scores.max(axis=1, keepdims=True)) / temperature
    return np.maximum(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)), IMPOSSIBLE_NATS)


def branch_pieces(source: Tensor) -> list[Tensor]:
    """`source` (branches, positions, ...) cut into pieces of whole branches; none for no positions.

    Pieces are cut by the branches' length alone, never by their company.
    """
    return list(source.split(max(1, BRANCH_ROWS // source.shape[1]))) if source.numel() else []


def head_pieces(hidden: Tensor, vocabulary: int) -> list[Tensor]:
    """`hidden` (rows, width) cut into pieces for the head."""
    return list(hidden.split(min(BRANCH_ROWS, max(1, HEAD_LOGITS // vocabulary))))


class CandidateScores:
    """ln p of every symbol of candidates, from logits as they come: rows of a whole vocabulary are not kept."""

    def __init__(self, candidates: Tensor, temperature: float) -> None:
        """candidates: (branches, length)."""
        self.candidates, self.temperature = candidates.numpy(), temperature
        self._first: NDArray[np.float32] | None = None
        self._inner: list[NDArray[np.float32]] = []
        self._asked = 0

    def add(self, logits: Tensor) -> None:
        """The next rows (rows, vocabulary): the first of all is for what follows the last known symbol, then there is
        one for each symbol of each candidate that has another after it."""
        nats = log_probabilities(logits, self.temperature).astype(np.float32)
        if self._first is None:
            self._first, nats = nats[0, self.candidates[:, 0]], nats[1:]
        asked = self.candidates[:, 1:].flatten()[self._asked : self._asked + len(nats)]
        self._inner.append(nats[np.arange(len(nats)), asked])
        self._asked += len(nats)

    def nats(self) -> NDArray[np.float32]:
        """(branches, length), once all rows were added."""
        assert self._first is not None
        return np.column_stack([self._first, np.concatenate(self._inner).reshape(len(self._first), -1)])


def judge(
    logits: Tensor, guesses: Sequence[int], odds: NDArray[np.float32], temperature: float, seed: int, position: int
) -> Verdict:
    """Accept guess x with probability min(1, p(x)/q(x)), up to the first that is refused (arXiv 2211.17192).

    logits: (guesses + 1, vocabulary), from the row that says what guess 0 should be, at `position`.
    odds: q(x) of each guess.
    """
    p = np.exp(log_probabilities(logits, temperature))
    draws = uniforms(seed, Purpose.ACCEPT, position, len(guesses), 1)[:, 0]
    # u q <= p and not u <= p / q: nothing overflows
    refused = (i for i, x in enumerate(guesses) if draws[i] * float(odds[i]) > p[i, x])
    accepted = next(refused, len(guesses))
    return Verdict(accepted, p[accepted])
