"""Continuations that a drafter proposes, and how much each weighs once a scorer has read it.

A candidate x weighs p(x) / q(x): drawn by weight from many candidates, a text has the scorer's distribution (sampling
importance resampling; chunk by chunk, with a small model as drafter: arXiv 2604.15672).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from stages.randomness import Purpose, uniforms
from stages.refusal import Refusal
from stages.v1 import stage_pb2

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """Continuations of one text, all of one length."""

    texts: list[bytes]
    nats: Floats
    """ln q of every symbol, as the drafter gave them: (candidates, symbols)."""
    compute_ms: float = 0.0


@dataclass(frozen=True)
class Weights:
    """What a scorer makes of candidates."""

    shares: Floats
    """(candidates,), together 1."""
    divergence_bits: float
    """KL(q || p) for a symbol: the mean of log2 q/p over all candidates. Without bias, however few they are."""

    @property
    def effective(self) -> float:
        return effective(self.shares)

    def choose(self, seed: int, position: int) -> int:
        """One candidate, drawn by weight with the numbers of `position`, that of its first symbol."""
        return int(draw(self.shares[None], uniforms(seed, Purpose.CHOICE, position, 1, 1)[:, 0])[0])


def effective(shares: Floats) -> float:
    """Effective sample size, 1 / sum of squares: 1 to the number of candidates. shares: together 1."""
    return float(1 / np.square(shares).sum())


def weigh(drafted: Candidates, nats: Floats) -> Weights:
    """:param nats: ln p of every symbol: (candidates, symbols)."""
    ratios = nats - drafted.nats
    totals = ratios.sum(axis=1)
    best = totals.max()
    # a scorer that finds every candidate impossible leaves no choice but the drafter's
    shares = np.exp(totals - best) if math.isfinite(best) else np.ones(len(totals))
    return Weights(shares / shares.sum(), float(-ratios.mean() / math.log(2)))


def read_scores(payload: bytes, count: int, length: int) -> Floats:
    """ln p of every symbol of candidates from a `Scores` message: (count, length). Raises Refusal for another."""
    if len(payload) != 4 * count * length:
        raise Refusal(
            grpc.StatusCode.INTERNAL,
            f"scores of {count} candidates of {length} symbols came back as {len(payload)} bytes",
        )
    nats = np.frombuffer(payload, dtype="<f4").astype(np.float64).reshape(count, length)
    if np.isnan(nats).any():
        raise Refusal(grpc.StatusCode.INTERNAL, "the scores of candidates are not numbers: look at the hosts' weights")
    return nats


def check_scores(event: stage_pb2.Event, shape: tuple[int, ...]) -> None:
    """Raise Refusal unless `event` brings scores of (count, length) symbols."""
    read_scores(event.scores.nats, *shape)


def draw(odds: Floats, u: Floats) -> NDArray[np.int64]:
    """One index for each row of `odds`, which need not add up to 1. odds: (rows, n); u: (rows,), in (0, 1]."""
    below = odds.cumsum(axis=1)
    return np.asarray((below < u[:, None] * below[:, -1:]).sum(axis=1))
