"""Sampling importance resampling: a drafter writes candidates, a model scores them, and one is drawn by weight.

A candidate x has weight p(x) / q(x). Drawn by weight from many candidates, a text has the scorer's distribution (chunk
by chunk, with a small model as drafter: arXiv 2604.15672).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.model.randomness import Purpose, uniforms
from stages.model.scoring import Floats

# With fewer effective candidates, likelier texts were never proposed, so the weights cannot reveal them.
MIN_EFFECTIVE = 2.0


@dataclass(frozen=True)
class Candidates:
    """Continuations of one text, all of equal length."""

    texts: list[bytes]
    # ln q of every token, from the drafter: (candidates, tokens).
    nats: Floats
    compute_ms: float = 0.0


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights of candidates, from a scorer's and the drafter's probabilities."""

    # (candidates,), together 1.
    shares: Floats
    # KL(q || p) per token: the mean of log2 q/p over all candidates. Unbiased, however few there are.
    divergence_bits: float

    @property
    def effective(self) -> float:
        """Effective sample size, 1 / sum of squares: 1 to the number of candidates."""
        return float(1 / np.square(self.shares).sum())

    @property
    def distance_bound(self) -> float:
        """An upper bound on the total variation between the drawn text's distribution and the scorer's, estimated from
        these weights; 1, which says nothing, if one candidate has nearly all of them.

        Of M candidates from q, with w = p/q, x is drawn with p(x) E[M / (w(x) + w_2 + ... + w_M)], by Jensen at least
        p(x) M / (w(x) + M - 1). So the distance is at most E_p[max(w - 1, 0) / (w + M - 1)], here with the weights' own
        mean as 1. (The minorisation of Andrieu, Lee and Vihola 2018, arXiv 1312.6432. It is below the 6 E_p[w] / M of
        Agapiou et al. 2017, arXiv 1511.06196, theorem 2.1.)
        """
        if self.effective < MIN_EFFECTIVE:
            return 1.0
        count = len(self.shares)
        w = count * self.shares
        return float((self.shares * np.maximum(w - 1, 0) / (w + count - 1)).sum())

    def choose(self, seed: int, position: int) -> int:
        """Draw one candidate by weight, with the random numbers of `position`, that of its first token."""
        return int(draw(self.shares[None], uniforms(seed, Purpose.CHOICE, position, 1, 1)[:, 0])[0])


def weigh(nats: Floats, drafter_nats: Floats, length: int) -> ImportanceWeights:
    """:param nats: ln p of each candidate, and :param drafter_nats: ln q: (candidates,).
    :param length: tokens in each."""
    totals = nats - drafter_nats
    best = totals.max()
    # if the scorer finds every candidate impossible, only the drafter's choice is left
    shares = np.exp(totals - best) if math.isfinite(best) else np.ones(len(totals))
    return ImportanceWeights(shares / shares.sum(), float(-totals.mean() / length / math.log(2)))


def draw(probs: Floats, u: Floats) -> NDArray[np.int64]:
    """One index for each row of `probs`, which need not add up to 1. probs: (rows, n); u: (rows,), in (0, 1]."""
    below = probs.cumsum(axis=1)
    return np.asarray((below < u[:, None] * below[:, -1:]).sum(axis=1))
