"""Probabilities of tokens: scores of candidates, and settings that shape a model's distribution."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stages.device import Tensor, tensor_of
from stages.limits import MAX_BIAS, MAX_BIASES, MAX_PENALTY, MAX_REPETITION_PENALTY
from stages.settings import limits

# Candidates are sent as a list, not as a tree of shared beginnings: they diverge within a few tokens, so a tree would
# save next to nothing and cost a mask.
# Tokens of all candidates of a hop together: limited by the message, and by a host's memory for one hop.
MAX_SCORED_ROWS = 4096
MAX_SCORED_NUMBERS = 1 << 24  # of their hidden states: rows x width. 64 MB.
# Candidates of a step are sent in batches of about this many tokens: host 2 computes the first batch while host 1
# computes the second.
BATCH_ROWS = 512
BRANCH_ROWS = 256  # candidates are evaluated in pieces of about this many rows, so that other hops need not wait long
MAX_LOGITS = 1 << 24  # numbers that a head may compute at once: rows x vocabulary. 64 MB.
HEAD_LOGITS = 1 << 22  # for candidates it computes about this many at once
IMPOSSIBLE_NATS = -1e30  # stands for ln 0: finite in float32, as are its sums


def max_scored(width: int) -> int:
    """Tokens of all candidates of a hop together, in a model of this width."""
    return min(MAX_SCORED_ROWS, MAX_SCORED_NUMBERS // width)


def batch_rows(width: int) -> int:
    """Tokens of all candidates of a batch, for a model of this width."""
    return min(BATCH_ROWS, max_scored(width))


def candidates_together(length: int, count: int, rows: int) -> int:
    """Candidates of `length` tokens in a batch of about `rows`, of `count` in all. Batches are as even as possible."""
    # candidates of one token are scored once the text before them is read: no work is left to divide among hosts
    most = max(1, rows // length) if length > 1 else count
    return -(-count // -(-count // most))


def log_probabilities(logits: Tensor, temperature: float) -> NDArray[np.float64]:
    """Log-probability (ln) of each token at `temperature`; at 0 it is 0 for the argmax. (rows, vocabulary), as
    `logits`.

    Nothing is below IMPOSSIBLE_NATS.
    """
    scores = logits.detach().double().cpu().numpy()
    if temperature <= 0:
        nats = np.full_like(scores, IMPOSSIBLE_NATS)
        np.put_along_axis(nats, scores.argmax(axis=1)[:, None], 0.0, axis=1)
        return nats
    with np.errstate(over="ignore"):  # relative to the best, as in sample_tokens
        scores = (scores - scores.max(axis=1, keepdims=True)) / temperature
    return np.maximum(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)), IMPOSSIBLE_NATS)


def most_likely(nats: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The `count` most likely tokens, the likeliest first; among equals, the lower numbers. nats: (vocabulary,)."""
    count = min(count, len(nats))
    if not count:
        return np.empty(0, dtype=np.int64)
    among = np.flatnonzero(nats >= np.partition(nats, -count)[-count])
    return among[np.argsort(-nats[among], kind="stable")][:count]


def branch_pieces(source: Tensor) -> list[Tensor]:
    """`source` (branches, positions, ...) cut into pieces of whole branches; none for no positions.

    Only the branches' length decides the cuts, never the rest of the batch.
    """
    return list(source.split(max(1, BRANCH_ROWS // source.shape[1]))) if source.numel() else []


def head_pieces(hidden: Tensor, vocabulary: int) -> list[Tensor]:
    """`hidden` (rows, width) cut into pieces for the head."""
    return list(hidden.split(min(BRANCH_ROWS, max(1, HEAD_LOGITS // vocabulary))))


class CandidateScores:
    """ln p of candidates, from logits as they arrive: it keeps no rows of a whole vocabulary."""

    def __init__(self, candidates: Tensor, temperature: float) -> None:
        """candidates: (branches, length)."""
        self.candidates, self.temperature = candidates.numpy(), temperature
        self._first: NDArray[np.float64] | None = None
        self._inner: list[NDArray[np.float64]] = []
        self._asked = 0

    def add(self, logits: Tensor) -> None:
        """Add the next rows (rows, vocabulary): the very first is for the token after the last known one, then one for
        each token of each candidate that has another after it."""
        nats = log_probabilities(logits, self.temperature)
        if self._first is None:
            self._first, nats = nats[0, self.candidates[:, 0]], nats[1:]
        asked = self.candidates[:, 1:].flatten()[self._asked : self._asked + len(nats)]
        self._inner.append(nats[np.arange(len(nats)), asked])
        self._asked += len(nats)

    def nats(self) -> NDArray[np.float64]:
        """ln p of each candidate, all its tokens together: (branches,), once all rows were added."""
        # The host adds up: a candidate sends 8 bytes instead of 4 per token, and no mode needs each token's own.
        # Drawing here would save no trip, and little next to the hidden states: the router reports, from all scores,
        # how many candidates the weights leave, and how far the text may be from the model's.
        assert self._first is not None
        return np.asarray(self._first + np.concatenate(self._inner).reshape(len(self._first), -1).sum(axis=1))


Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]


# Shaping is a pure function of logits and tokens so far: `ar` and the verification of its drafts draw from the same
# numbers.
def bias_problem(biases: Mapping[int, float], vocabulary: int) -> str:
    """Why these cannot be biases for a vocabulary of that size; empty if they can."""
    if len(biases) > MAX_BIASES:
        return f"logit_bias has {len(biases)} entries; the limit is {MAX_BIASES}"
    for token, bias in biases.items():
        if not token < vocabulary:
            return f"logit_bias names token {token}, but the model has 0 to {vocabulary - 1}"
        if not abs(bias) <= MAX_BIAS:  # true for NaN, too
            return f"logit_bias must be -{MAX_BIAS:g} to {MAX_BIAS:g}, not {bias} for token {token}"
    return ""


FEW = 64  # tokens that are sorted first


@dataclass(frozen=True)
class Shaping:
    """Settings that shape a distribution. The defaults change nothing, not even a bit."""

    # Keep this many of the most likely tokens; 0: all. Among equals, the lower numbers.
    top_k: int = 0
    # Of these, keep the most likely with this total share (Holtzman et al. 2019, arXiv 1904.09751).
    top_p: float = field(default=1.0, metadata=limits(above=0, maximum=1))
    # Of these, keep those at least this likely, relative to the most likely one (Nguyen et al. 2024, arXiv 2407.01082).
    min_p: float = field(default=0.0, metadata=limits(minimum=0, maximum=1))
    # Subtracted from a token's logit for each time that it was written, and once if it was.
    frequency_penalty: float = field(default=0.0, metadata=limits(minimum=-MAX_PENALTY, maximum=MAX_PENALTY))
    presence_penalty: float = field(default=0.0, metadata=limits(minimum=-MAX_PENALTY, maximum=MAX_PENALTY))
    # Divides the logit of a token that was read or written, or multiplies it if negative (Keskar et al. 2019, arXiv
    # 1909.05858).
    repetition_penalty: float = field(default=1.0, metadata=limits(above=0, maximum=MAX_REPETITION_PENALTY))
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of tokens, after the penalties
    prompt: int = 0  # number of given tokens: later ones were written

    @property
    def adjusts(self) -> bool:
        """True if it changes logits."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1
        return any(penalties) or len(self.logit_bias) > 0

    def adjusted(self, logits: Tensor, known: Tokens) -> Tensor:
        """Logits with penalties and biases: (1, vocabulary), as `logits`, which follow the tokens `known`."""
        if not self.adjusts:
            return logits
        row = logits[0].detach().double().cpu().numpy().copy()
        if self.repetition_penalty != 1:
            seen = np.unique(known)
            scores = row[seen]
            row[seen] = np.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
        written, times = np.unique(known[self.prompt :], return_counts=True)
        row[written] -= self.frequency_penalty * times + self.presence_penalty
        for token, bias in self.logit_bias.items():
            row[token] += bias
        return tensor_of(row)[None]

    def filtered(self, scores: Floats) -> Floats:
        """`scores` with -inf for excluded tokens; the most likely one stays.

        scores: (rows, vocabulary), ln of probabilities at the request's temperature, up to a constant in each row.
        """
        if self.top_k == 0 and self.top_p == 1 and self.min_p == 0:
            return scores
        kept = np.full_like(scores, -np.inf)
        for row, result in zip(scores, kept, strict=True):
            tokens = self._kept(row)
            result[tokens] = row[tokens]
        return kept

    def _kept(self, row: Floats) -> Tokens:
        most, probs = self.top_k or len(row), np.exp(row - row.max())
        share = np.inf
        if self.top_p < 1:
            share = self.top_p * (probs[most_likely(row, most)] if most < len(row) else probs).sum()
        # Sorting a whole vocabulary takes longer than computing a small stage, and few tokens are kept.
        some = FEW
        while True:
            tokens = most_likely(row, min(some, most))
            within = 1 + int((np.cumsum(probs[tokens])[:-1] < share).sum())
            kept = min(within, int((probs[tokens] >= self.min_p).sum()))
            if kept < len(tokens) or some >= min(most, len(row)):
                return tokens[:kept]
            some *= 8


PLAIN = Shaping()
