"""Settings of a request that shape the distribution that a symbol is drawn from.

A pure function of logits and symbols so far: `ar`, and what verifies guesses of it, draw from the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.limits import MAX_BIAS, MAX_BIASES
from stages.model.scoring import likeliest

Floats = NDArray[np.float64]
Symbols = NDArray[np.int64]


def bias_problem(biases: Mapping[int, float], vocabulary: int) -> str:
    """Why these cannot be biases for a vocabulary of that size; empty where they can."""
    if len(biases) > MAX_BIASES:
        return f"logit_bias has {len(biases)} entries, at most {MAX_BIASES}"
    for symbol, bias in biases.items():
        if not symbol < vocabulary:
            return f"logit_bias names token {symbol}, the model has 0 to {vocabulary - 1}"
        if not abs(bias) <= MAX_BIAS:  # true for NaN, too
            return f"logit_bias must be -{MAX_BIAS:g} to {MAX_BIAS:g}, not {bias} for token {symbol}"
    return ""


@dataclass(frozen=True)
class Shaping:
    """Settings that shape a distribution. The defaults change nothing, not even a bit."""

    # The most likely symbols, so many; 0: all. Of equally likely ones those with the lower numbers.
    top_k: int = 0
    # Of these, the most likely that have this share together (Holtzman et al. 2019, arXiv 1904.09751).
    top_p: float = 1.0
    # Of these, those at least so likely, as a share of the most likely one (Nguyen et al. 2024, arXiv 2407.01082).
    min_p: float = 0.0
    # Taken from the logit of a symbol for each time that it was written, and once if it was.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # What the logit of a symbol that was read or written is divided by, or multiplied where it is negative (Keskar et
    # al. 2019, arXiv 1909.05858).
    repetition_penalty: float = 1.0
    # Added to the logits of symbols, after the penalties.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # Number of symbols that were given: those after them were written.
    prompt: int = 0

    @property
    def adjusts(self) -> bool:
        """True if it changes logits."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1
        return any(penalties) or len(self.logit_bias) > 0

    def adjusted(self, logits: Tensor, known: Symbols) -> Tensor:
        """Logits with penalties and biases: (1, vocabulary), as `logits`, which are those after the symbols `known`."""
        if not self.adjusts:
            return logits
        row = logits[0].detach().double().cpu().numpy().copy()
        if self.repetition_penalty != 1:
            seen = np.unique(known)
            scores = row[seen]
            row[seen] = np.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
        written, times = np.unique(known[self.prompt :], return_counts=True)
        row[written] -= self.frequency_penalty * times + self.presence_penalty
        for symbol, bias in self.logit_bias.items():
            row[symbol] += bias
        return torch.from_numpy(row)[None]

    @property
    def filters(self) -> bool:
        """True if it leaves symbols out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def filtered(self, scores: Floats) -> Floats:
        """`scores` with -inf for symbols that are left out; the most likely one stays.

        scores: (rows, vocabulary), ln of probabilities at the request's temperature, but for a constant in each row.
        """
        if not self.filters:
            return scores
        kept = np.full_like(scores, -np.inf)
        for row, result in zip(scores, kept, strict=True):
            symbols = self._kept(row)
            result[symbols] = row[symbols]
        return kept

    def _kept(self, row: Floats) -> Symbols:
        symbols = likeliest(row, self.top_k or len(row))
        odds = np.exp(row[symbols] - row[symbols[0]])
        count = len(symbols)
        if self.top_p < 1:
            before = np.cumsum(odds)
            count = 1 + int((before[:-1] < self.top_p * before[-1]).sum())
        return symbols[: min(count, int((odds >= self.min_p).sum()))]


PLAIN = Shaping()
