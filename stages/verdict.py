"""Verdicts on guesses: how far they stand, and what the model would write in place of the first that does not.

Rejection sampling (Leviathan et al. 2023, arXiv 2211.17192): guess x, which a drafter drew with odds q, stands with
probability min(1, p(x)/q(x)); in its place comes a draw from the part of p that exceeds q. Who drafts knows q of all
symbols, and the host p. Neither has to travel: the host answers with a set of draws from p, each with its p, and of
these the first is kept that a number of its own accepts with probability max(0, 1 - q/p), which is such a draw. Where
none is kept, a larger set is asked for. There are at most as many as there are symbols: then p itself is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stages.randomness import Purpose, gumbels_of, uniforms
from stages.scoring import log_probabilities

DRAWS = (64, 1024)
"""Draws of the first set, and of the second. The third is p."""
MAX_SET = len(DRAWS) + 1

Floats = NDArray[np.float64]
Symbols = NDArray[np.int64]


@dataclass(frozen=True)
class Verdict:
    """How far guesses were accepted."""

    accepted: int
    symbols: Symbols
    """What the model would write after the accepted ones: draws, or all symbols; none where every guess stands."""
    odds: Floats
    """p of each of them."""


def set_size(number: int, vocabulary: int) -> int:
    """Symbols in a set, counted from 1."""
    return min(DRAWS[number - 1], vocabulary) if number <= len(DRAWS) else vocabulary


def judge(
    logits: Tensor,
    guesses: Sequence[int],
    odds: NDArray[np.float32],
    temperature: float,
    seed: int,
    position: int,
    number: int = 1,
) -> Verdict:
    """A verdict on guesses from `position` on. Looks at no row after the first refused guess.

    logits: (guesses, vocabulary), that say what each guess should be, or the one row of `position` without guesses.
    odds: q(x) of each guess. number: of the set that is asked for.
    """
    u = uniforms(seed, Purpose.ACCEPT, position, len(guesses), 1)[:, 0]
    for i, guess in enumerate(guesses):
        p = _probabilities(logits[i], temperature)
        if not u[i] * float(odds[i]) <= p[guess]:  # not u > p / q: nothing overflows; and true for NaN
            return Verdict(i, *drawn_set(p, seed, position + i, number))
    if guesses:
        return Verdict(len(guesses), np.empty(0, dtype=np.int64), np.empty(0))
    return Verdict(0, *drawn_set(_probabilities(logits[0], temperature), seed, position, number))


def drawn_set(p: Floats, seed: int, position: int, number: int) -> tuple[Symbols, Floats]:
    """The set of a position: symbols, and p of each. p: (vocabulary,)."""
    size = set_size(number, len(p))
    symbols = np.arange(size) if size == len(p) else _draws(p, seed, position, number, size)
    return symbols, p[symbols]


def _probabilities(logits: Tensor, temperature: float) -> Floats:
    return np.asarray(np.exp(log_probabilities(logits[None], temperature)[0]))


def _draws(p: Floats, seed: int, position: int, number: int, count: int) -> Symbols:
    """Independent draws (count,): of a block of symbols by Gumbel numbers, then of one of its symbols.

    Where p is rounded otherwise, as on another machine, nearly all draws stay what they are; looked up in sums of p,
    they would not.
    """
    width = math.isqrt(len(p) - 1) + 1
    blocks = np.zeros((-(-len(p) // width), width))
    blocks.flat[: len(p)] = p
    noise = gumbels_of(uniforms(seed, Purpose.DRAW, position, 1, count * (len(blocks) + width), number)[0])
    noise = noise.reshape(count, -1)
    with np.errstate(divide="ignore"):  # what is impossible stays so
        block = (np.log(blocks.sum(axis=1)) + noise[:, : len(blocks)]).argmax(axis=1)
        within = (np.log(blocks)[block] + noise[:, len(blocks) :]).argmax(axis=1)
    return np.asarray(block * width + within)
