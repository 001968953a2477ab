"""Continuations that a drafter proposes, and how much each weighs once a scorer has read it.

A candidate x weighs p(x) / q(x): drawn by weight from many candidates, a text has the scorer's distribution (sampling
importance resampling; chunk by chunk, with a small model as drafter: arXiv 2604.15672).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onesweep.serving.modes.drafters.base import LocalSequence
from onesweep.serving.modes.drafters.passes import Writing
from onesweep.stages.model.randomness import Purpose, uniforms
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.status import internal

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """Continuations of one text, all of one length."""

    texts: list[bytes]
    # ln q of every symbol, as the drafter gave them: (candidates, symbols).
    nats: Floats
    compute_ms: float = 0.0


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights of candidates, from a scorer's and the drafter's probabilities."""

    # (candidates,), together 1.
    shares: Floats
    # KL(q || p) for a symbol: the mean of log2 q/p over all candidates. Without bias, however few they are.
    divergence_bits: float

    @property
    def effective(self) -> float:
        return effective(self.shares)

    def choose(self, seed: int, position: int) -> int:
        """One candidate, drawn by weight with the numbers of `position`, that of its first symbol."""
        return int(draw(self.shares[None], uniforms(seed, Purpose.CHOICE, position, 1, 1)[:, 0])[0])


def effective(shares: Floats) -> float:
    """Effective sample size, 1 / sum of squares: 1 to the number of candidates. shares: together 1."""
    return float(1 / np.square(shares).sum())


def weigh(drafted: Candidates, nats: Floats) -> ImportanceWeights:
    """:param nats: ln p of every symbol: (candidates, symbols)."""
    ratios = nats - drafted.nats
    totals = ratios.sum(axis=1)
    best = totals.max()
    # a scorer that finds every candidate impossible leaves no choice but the drafter's
    shares = np.exp(totals - best) if math.isfinite(best) else np.ones(len(totals))
    return ImportanceWeights(shares / shares.sum(), float(-ratios.mean() / math.log(2)))


def read_scores(payload: bytes, count: int, length: int) -> Floats:
    """ln p of every symbol of candidates from a `Scores` message: (count, length). Raises Refusal for another."""
    if len(payload) != 4 * count * length:
        raise internal(f"scores of {count} candidates of {length} symbols came back as {len(payload)} bytes")
    nats = np.frombuffer(payload, dtype="<f4").astype(np.float64).reshape(count, length)
    if np.isnan(nats).any():
        raise internal("the scores of candidates are not numbers: look at the hosts' weights")
    return nats


def check_scores(event: stage_pb2.Event, shape: tuple[int, ...]) -> None:
    """Raise Refusal unless `event` brings scores of (count, length) symbols."""
    read_scores(event.scores.nats, *shape)


def draw(odds: Floats, u: Floats) -> NDArray[np.int64]:
    """One index for each row of `odds`, which need not add up to 1. odds: (rows, n); u: (rows,), in (0, 1]."""
    below = odds.cumsum(axis=1)
    return np.asarray((below < u[:, None] * below[:, -1:]).sum(axis=1))


# Many continuations of one text, written together by the local model. The text itself is read, and kept, once.

# Branches that one round may have: each branch of each round draws from a stream of its own.
ROUND = 1 << 16
# Odds that are looked at together: 2 MB, whatever the vocabulary.
DRAWN_AT_ONCE = 1 << 18


class Branches:
    """Writes candidates after a sequence's text, a symbol of all of them at a time, in passes that requests share."""

    def __init__(self, sequence: LocalSequence) -> None:
        self.sequence = sequence

    async def write(self, text: bytes, length: int, count: int, number: int) -> Candidates:
        """`count` continuations of `text`, each of `length` symbols. Raises StatusError at the request's deadline.

        :param number: of the round. Another round draws other numbers, even for the same positions.
        """
        sequence, alphabet = self.sequence, self.sequence.model.alphabet

        def numbers() -> Floats:
            at, first = alphabet.count(text), number * ROUND
            streams = (uniforms(sequence.seed, Purpose.CANDIDATE, at, length, 1, first + i) for i in range(count))
            return np.concatenate(list(streams), axis=1)

        writing = Writing(sequence.text, text, sequence.temperature, numbers, sequence.deadline_unix_ms)
        written = await sequence.model.passes.write(writing)
        texts = [alphabet.encode(row) for row in written.symbols]
        return Candidates(texts, np.log(written.odds, dtype=np.float64), written.compute_ms)


def rows_at_once(vocabulary: int) -> int:
    """Rows of odds that are looked at together."""
    return max(1, DRAWN_AT_ONCE // vocabulary)
