"""Sampling importance resampling: a drafter writes candidates, a model scores them, and one is drawn by weight.

A candidate x weighs p(x) / q(x): drawn by weight from many candidates, a text has the scorer's distribution (chunk by
chunk, with a small model as drafter: arXiv 2604.15672).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stages.model.randomness import Purpose, uniforms

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]

# With fewer effective candidates the likelier texts were not even proposed, and their weights cannot tell of them.
LEAST_EFFECTIVE = 2.0


@dataclass(frozen=True)
class Candidates:
    """Continuations of one text, all of one length."""

    texts: list[bytes]
    # ln q of every token, as the drafter gave them: (candidates, tokens).
    nats: Floats
    compute_ms: float = 0.0


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights of candidates, from a scorer's and the drafter's probabilities."""

    # (candidates,), together 1.
    shares: Floats
    # KL(q || p) for a token: the mean of log2 q/p over all candidates. Without bias, however few they are.
    divergence_bits: float

    @property
    def effective(self) -> float:
        """Effective sample size, 1 / sum of squares: 1 to the number of candidates."""
        return float(1 / np.square(self.shares).sum())

    @property
    def distance_bound(self) -> float:
        """An upper bound on the total variation between what is drawn and the scorer's distribution, estimated from
        these weights; 1, which says nothing, where one candidate has nearly all of them.

        Of M candidates from q, with w = p/q, x is drawn with p(x) E[M / (w(x) + w_2 + ... + w_M)], by Jensen at least
        p(x) M / (w(x) + M - 1). So the distance is at most E_p[max(w - 1, 0) / (w + M - 1)], here with the weights' own
        mean as 1. (The minorisation of Andrieu, Lee and Vihola 2018, arXiv 1312.6432. It is below the 6 E_p[w] / M of
        Agapiou et al. 2017, arXiv 1511.06196, theorem 2.1.)
        """
        if self.effective < LEAST_EFFECTIVE:
            return 1.0
        count = len(self.shares)
        w = count * self.shares
        return float((self.shares * np.maximum(w - 1, 0) / (w + count - 1)).sum())

    def choose(self, seed: int, position: int) -> int:
        """One candidate, drawn by weight with the numbers of `position`, that of its first token."""
        return int(draw(self.shares[None], uniforms(seed, Purpose.CHOICE, position, 1, 1)[:, 0])[0])


def weigh(nats: Floats, drafter_nats: Floats, length: int) -> ImportanceWeights:
    """:param nats: ln p of each candidate, and :param drafter_nats: ln q: (candidates,).
    :param length: of each, tokens."""
    totals = nats - drafter_nats
    best = totals.max()
    # a scorer that finds every candidate impossible leaves no choice but the drafter's
    shares = np.exp(totals - best) if math.isfinite(best) else np.ones(len(totals))
    return ImportanceWeights(shares / shares.sum(), float(-totals.mean() / length / math.log(2)))


def draw(probs: Floats, u: Floats) -> NDArray[np.int64]:
    """One index for each row of `probs`, which need not add up to 1. probs: (rows, n); u: (rows,), in (0, 1]."""
    below = probs.cumsum(axis=1)
    return np.asarray((below < u[:, None] * below[:, -1:]).sum(axis=1))


# What candidates are drawn with

# Probabilities that are looked at together, whatever the vocabulary: 1 MB of float32.
DRAWN_AT_ONCE = 1 << 18
BLOCK = 256  # probabilities whose running sum is taken one by one; of more, that of such blocks comes first
# Temperature below which the likeliest token takes all: no logit divided by it overflows.
LEAST_TEMPERATURE = 1e-30


def candidate_numbers(seed: int, position: int, length: int, count: int, first: int) -> Floats:
    """Numbers in (0, 1] that draw the tokens of candidates from `position` on: (length, count).

    :param first: stream of the first one; each has its own."""
    streams = [uniforms(seed, Purpose.CANDIDATE, position, length, 1, first + i) for i in range(count)]
    return np.concatenate(streams, axis=1)


# Every operation is one of rows, or gives the same for a number wherever it stands: what is drawn does not depend on
# the rows beside it.
def draw_tokens(logits: Tensor, sharpness: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row, and its probability: (rows, 1) both.

    :param logits: (rows, vocabulary).
    :param sharpness: 1 / temperature, (rows, 1), at most 1 / LEAST_TEMPERATURE.
    :param u: in (0, 1], (rows, 1) float64.
    """
    import torch

    rows = max(1, DRAWN_AT_ONCE // logits.shape[1])
    if len(logits) > rows:
        parts = [draw_tokens(*each) for each in zip(*(x.split(rows) for x in (logits, sharpness, u)), strict=True)]
        tokens, probs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(probs)
    all_probs = (logits * sharpness).softmax(-1)
    chosen = _reached(all_probs, u)
    return chosen, all_probs.gather(1, chosen)


def _reached(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the running sum of a row reaches the share u of the whole: (rows, 1), never of a share 0."""
    import torch
    from torch.nn import functional as F

    if probs.shape[1] > BLOCK:
        blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        sums = blocks.sum(2, dtype=torch.float64)
        below = sums.cumsum(1)
        reach = u * below[:, -1:]
        block = torch.searchsorted(below, reach)
        own = sums.gather(1, block)
        within = (reach - below.gather(1, block) + own) / own
        inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
        # rounding may put it a last bit outside of its block
        return block * BLOCK + _reached(inside, within.clamp(torch.finfo(torch.float64).tiny, 1))
    below = probs.cumsum(1, dtype=torch.float64)
    return torch.searchsorted(below, u * below[:, -1:])
