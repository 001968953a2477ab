"""Continuations that a drafter proposes, and how much each weighs once a scorer has read it.

A candidate x weighs p(x) / q(x): drawn by weight from many candidates, a text has the scorer's distribution (sampling
importance resampling; chunk by chunk, with a small model as drafter: arXiv 2604.15672).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.modes.drafters.local_model import LocalSequence
from serving.modes.drafters.passes import DraftJob
from stages.model.randomness import Purpose, uniforms
from stages.wire.status import internal

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


def weigh(drafted: Candidates, nats: Floats) -> ImportanceWeights:
    """:param nats: ln p of each: (candidates,)."""
    totals = nats - drafted.nats.sum(axis=1)
    best = totals.max()
    # a scorer that finds every candidate impossible leaves no choice but the drafter's
    shares = np.exp(totals - best) if math.isfinite(best) else np.ones(len(totals))
    return ImportanceWeights(shares / shares.sum(), float(-totals.sum() / drafted.nats.size / math.log(2)))


def read_scores(payload: bytes, count: int) -> Floats:
    """ln p of each candidate from a `Scores` message: (count,). Raises StatusError for another."""
    if len(payload) != 8 * count:
        raise internal(f"scores of {count} candidates came back as {len(payload)} bytes")
    nats = np.frombuffer(payload, dtype="<f8").astype(np.float64)
    if np.isnan(nats).any():
        raise internal("the scores of candidates are not numbers: look at the hosts' weights")
    return nats


def draw(probs: Floats, u: Floats) -> NDArray[np.int64]:
    """One index for each row of `probs`, which need not add up to 1. probs: (rows, n); u: (rows,), in (0, 1]."""
    below = probs.cumsum(axis=1)
    return np.asarray((below < u[:, None] * below[:, -1:]).sum(axis=1))


# Many continuations of one text, written together by the local model. The text itself is read, and kept, once.

# Branches that one round may have: each branch of each round draws from a stream of its own.
ROUND = 1 << 16


async def write_candidates(sequence: LocalSequence, text: bytes, length: int, count: int, number: int) -> Candidates:
    """`count` continuations of `text`, each of `length` tokens, a token of all of them at a time, in passes that
    requests share. Raises StatusError at the request's deadline.

    :param number: of the round. Another round draws other numbers, even for the same positions.
    """
    vocabulary = sequence.model.vocabulary

    def numbers() -> Floats:
        at, first = vocabulary.count(text), number * ROUND
        streams = (uniforms(sequence.seed, Purpose.CANDIDATE, at, length, 1, first + i) for i in range(count))
        return np.concatenate(list(streams), axis=1)

    cache_bytes = count * sequence.model.text_bytes(length)
    job = DraftJob(sequence.text, text, sequence.temperature, numbers, sequence.due_at, cache_bytes)
    written = await sequence.model.passes.draft(job)
    texts = [vocabulary.encode(row) for row in written.tokens]
    return Candidates(texts, np.log(written.probs, dtype=np.float64), written.compute_ms)
