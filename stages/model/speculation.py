"""Guesses of what a model will write: a chain of symbols, or a tree of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onesweep.stages.model.randomness import Purpose, gumbels_of, uniforms
from onesweep.stages.model.scoring import log_probabilities
from onesweep.stages.model.shaping import PLAIN, Shaping

MAX_DRAFT_TREE = 64  # guesses of a tree


# A tree is read depth first, position by position. With a mask over all rows the order in which a kernel adds would
# depend on the tree, and a near tie could fall otherwise than in `ar`. Here the cache holds, when a draft token is
# computed, exactly what stands before it on its branch, so the result is the same to the last bit
# (tests/stages/host/test_draft_trees.py).
class DraftTree:
    """Guesses depth first: each is followed by what may come after it, as far as anything is guessed there.

    `depths`: how many guesses are before each on its own branch. A chain has depths 0, 1, 2 ...
    """

    def __init__(self, symbols: Sequence[int], depths: Sequence[int]) -> None:
        """The depths must be `in_order`."""
        self.symbols, self.depths = symbols, depths
        self._children = dict[tuple[int, int], int]()
        branch = list[int]()
        for at, (symbol, depth) in enumerate(zip(symbols, depths, strict=True)):
            del branch[depth:]
            branch.append(self._children.setdefault((branch[-1] if branch else -1, symbol), at))

    def after(self, at: int, symbol: int) -> int:
        """The guess that `symbol` follows guess `at`, which is -1 for what was known; -1 where nobody guessed it."""
        return self._children.get((at, symbol), -1)

    def path(self, symbols: Sequence[int]) -> list[int]:
        """The guesses that `symbols` are, one after the other."""
        at, found = -1, list[int]()
        for symbol in symbols:
            if (at := self.after(at, symbol)) < 0:
                break
            found.append(at)
        return found


def are_depths(depths: Sequence[int]) -> bool:
    """True if these can be depths of a tree, each draft token but the first ones after another one."""
    before = -1
    for depth in depths:
        if not 0 <= depth <= before + 1:
            return False
        before = depth
    return True


def tree_positions(symbols: int, depths: Sequence[int]) -> int:
    """Positions that so many new symbols take, the last of them a tree: its branches take the same ones."""
    return symbols - len(depths) + max(depths, default=-1) + 1


def remembered_positions(symbols: int, depths: Sequence[int]) -> int:
    """Number of these positions that are kept: of a tree, those of its first branch."""
    return symbols - len(depths) + first_branch(depths)


def first_branch(depths: Sequence[int]) -> int:
    """Length of the first branch, which hosts remember."""
    return next((at for at, depth in enumerate(depths) if depth != at), len(depths))


# Verification by rejection sampling (Leviathan et al. 2023, arXiv 2211.17192): draft token x, which a drafter drew with
# odds q, stands with probability min(1, p(x)/q(x)); in its place comes a draw from the part of p that exceeds q. The
# drafter knows q of all symbols and the host p, and neither has to travel: the host answers with draws from p, each
# with its p, and of these the first is kept that a number of its own accepts with probability max(0, 1 - q/p), which is
# such a draw. Where none is kept, a larger set is asked for; the third set is p itself.
#
# `verified` rejects where `ar-speculative` samples with the random numbers of `ar`: it has no text to reproduce, and
# rejection accepts more. On 24 windows of validation text at temperature 0.8 that is 0.850 = 1 - TV against 0.828. All
# odds are 192 KB for 49,152 tokens; a first set of 64 draws keeps nothing with probability (1 - TV)^64, and there are
# never more than three trips.
DRAW_SET_SIZES = (64, 1024)  # draws of the first set, and of the second. The third is p.
MAX_DRAW_SET = len(DRAW_SET_SIZES) + 1

Floats = NDArray[np.float64]
Symbols = NDArray[np.int64]


@dataclass(frozen=True)
class Verification:
    """Result of a verification: how far draft tokens were accepted."""

    accepted: int
    # What the model would write after the accepted ones: draws, or all symbols; none where every guess stands.
    symbols: Symbols
    odds: Floats  # p of each of them


def draw_set_size(number: int, vocabulary: int) -> int:
    """Symbols in a set, counted from 1."""
    return min(DRAW_SET_SIZES[number - 1], vocabulary) if number <= len(DRAW_SET_SIZES) else vocabulary


def verify_drafts(
    logits: Tensor,
    guesses: Sequence[int],
    odds: NDArray[np.float32],
    temperature: float,
    seed: int,
    position: int,
    number: int = 1,
    shaping: Shaping = PLAIN,
) -> Verification:
    """A verdict on guesses from `position` on. Looks at no row after the first refused guess.

    logits: (guesses, vocabulary), that say what each guess should be, or the one row of `position` without guesses.
    odds: q(x) of each guess. number: of the set that is asked for.
    """
    u = uniforms(seed, Purpose.ACCEPT, position, len(guesses), 1)[:, 0]
    for i, guess in enumerate(guesses):
        p = _probabilities(logits[i], temperature, shaping)
        if not u[i] * float(odds[i]) <= p[guess]:  # not u > p / q: nothing overflows; and true for NaN
            return Verification(i, *draw_set(p, seed, position + i, number))
    if guesses:
        return Verification(len(guesses), np.empty(0, dtype=np.int64), np.empty(0))
    return Verification(0, *draw_set(_probabilities(logits[0], temperature, shaping), seed, position, number))


def draw_set(p: Floats, seed: int, position: int, number: int) -> tuple[Symbols, Floats]:
    """The set of a position: symbols, and p of each. p: (vocabulary,)."""
    size = draw_set_size(number, len(p))
    symbols = np.arange(size) if size == len(p) else _draws(p, seed, position, number, size)
    return symbols, p[symbols]


def _probabilities(logits: Tensor, temperature: float, shaping: Shaping) -> Floats:
    p = np.exp(shaping.filtered(log_probabilities(logits[None], temperature))[0])
    return np.asarray(p / p.sum() if shaping.filters else p)


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
