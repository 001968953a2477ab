"""Draft tokens after a text, as a chain or a tree of the likeliest few: how many pay, and which to send."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp

from stages.limits import MAX_DRAFT

MAX_DRAFT_TREE = 64  # draft tokens in a tree
DEFAULT_BRANCHES = 4  # grown if a request names no number: branches that do not pay are not sent
FORGET = 0.98  # weight of earlier measurements, at each further round
RECENT = 0.1  # weight of the last sweep among those whose times are known
DEFAULT_TOKEN_MS = 1.0  # time that a draft token adds to a sweep, until sweeps of more and of fewer were compared
# The weight of that assumption against comparisons: a sum of squared differences of their numbers.
SPREAD = 40.0
MAX_CERTAINTY = 0.99
NOISE_STEP, MIN_NOISE = 10.0, 0.01  # its logarithm grows by this for each surprising one among those tried


# A tree is read depth first, position by position. With a mask over all rows, a kernel's order of additions would
# depend on the tree, and a near tie could come out differently than in `ar`. Here, when a draft token is computed, the
# cache holds exactly the tokens before it on its branch, so the result is the same to the last bit
# (tests/stages/host/test_draft_trees.py).
def drafted_after(tokens: Sequence[int], depths: Sequence[int]) -> dict[tuple[int, int], int]:
    """By a draft token (-1 for the known text) and a token after it: the draft token that it is, if any.

    The draft tokens are in depth-first order: each is followed by the draft tokens after it, if any.

    :param depths: number of draft tokens before each on its own branch (`are_depths`). A chain has depths 0, 1, 2 ...
    """
    found, branch = dict[tuple[int, int], int](), list[int]()
    for at, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
        del branch[depth:]
        branch.append(found.setdefault((branch[-1] if branch else -1, token), at))
    return found


def are_depths(depths: Sequence[int]) -> bool:
    """True if these can be depths of a tree, in which each draft token but the first ones follows another one."""
    before = -1
    for depth in depths:
        if not 0 <= depth <= before + 1:
            return False
        before = depth
    return True


def tree_positions(tokens: int, depths: Sequence[int]) -> tuple[int, int]:
    """Positions that `tokens` new tokens take, the last of them a tree whose branches share positions; and how many of
    these positions are kept: those of its first branch."""
    before = tokens - len(depths)
    return before + max(depths) + 1, before + first_branch(depths)


def first_branch(depths: Sequence[int]) -> int:
    """Length of the first branch, which hosts keep."""
    return next((at for at, depth in enumerate(depths) if depth != at), len(depths))


class SweepTime:
    """Time of a sweep in milliseconds: linear in its draft tokens, as every host reads them all."""

    def __init__(self) -> None:
        self._drafted, self._ms, self._is_new = 8.0, 100.0, True
        self._squares = self._products = 0.0  # of differences from the means at that time

    def learn(self, drafted: int, ms: float) -> None:
        """Book a sweep."""
        if self._is_new:  # its distance from the assumed time says nothing about the price of a draft token
            self._drafted, self._ms, self._is_new = float(drafted), ms, False
        apart, longer = drafted - self._drafted, ms - self._ms
        self._drafted += RECENT * apart
        self._ms += RECENT * longer
        # The price of a token changes with the hosts, a sweep's time with any load: the price is remembered longer.
        self._squares = FORGET * self._squares + apart * apart
        self._products = FORGET * self._products + apart * longer

    @property
    def token_ms(self) -> float:
        """Time that one more draft token adds."""
        return max((self._products + SPREAD * DEFAULT_TOKEN_MS) / (self._squares + SPREAD), 0.0)

    def ms(self, drafted: int) -> float:
        """Time of a sweep with this many draft tokens."""
        return max(self._ms + self.token_ms * (drafted - self._drafted), self._ms / 10)


class DraftLength:
    """The number of draft tokens that pays, from past acceptance and past times of sweeps and drafting.

    A draft yields its accepted tokens and one more, in the time of the drafting and of the sweep. Its length
    maximises the quotient (Leviathan et al. 2023, arXiv 2211.17192, equation 1; for trees: Li et al. 2024,
    arXiv 2406.16858, who take the draft tokens that are likeliest jointly with all before them).
    """

    def __init__(self, sweeps: SweepTime, hides: bool = False) -> None:
        """:param hides: if a draft is accepted whole, the next one was drafted while it was under way."""
        self.sweeps, self.hides = sweeps, hides
        self._right, self._tried = 3.0, 4.0  # as if 3 of 4 draft tokens had been right so far
        # How much the model's sums of logits and Gumbel numbers differ from the drafter's, relative to those: a copy of
        # the model errs only at near ties, however random the text is.
        self.noise = 1.0
        self.level_ms = 1.0  # time per token of drafting one token after another

    @property
    def acceptance(self) -> float:
        """Share of accepted draft tokens among those whose position was reached."""
        return self._right / self._tried

    def learn(self, drafted: int, accepted: int, predicted: float, levels: int, draft_ms: float) -> None:
        """Book a round.

        :param accepted: accepted draft tokens of the first branch, which has `drafted` in a row.
        :param predicted: sum of the drafter's probabilities for draft tokens whose position was reached.
        :param levels: tokens drafted one after another while the request waited, in `draft_ms`.
        """
        if drafted:
            self._right = FORGET * self._right + accepted
            self._tried = FORGET * self._tried + accepted + (accepted < drafted)
            # grows with the expected acceptances that failed, and less the more was tried
            change = min(max(NOISE_STEP * (predicted - accepted) / self._tried, -1.0), 1.0)
            self.noise = min(max(self.noise * exp(change), MIN_NOISE), 1 / MIN_NOISE)
        if levels:
            self.level_ms += 0.2 * (draft_ms / levels - self.level_ms)

    def length(self) -> int:
        """Length of a chain of which only `acceptance` is known."""
        a = min(self.acceptance, MAX_CERTAINTY)
        return self.best([a ** (i + 1) for i in range(MAX_DRAFT)], self.level_ms) or 1

    def best(self, chances: Sequence[float], each_ms: float = 0.0, draft_ms: float = 0.0) -> int:
        """Number of draft tokens to send.

        :param chances: that each is accepted with all before it, the likeliest first.
        :param each_ms: time to draft each one.
        :param draft_ms: drafting time so far.
        """
        tokens = accumulate(chances, initial=1.0)
        rates = [n / (draft_ms + i * each_ms + self.sweeps.ms(i)) for i, n in enumerate(tokens)]
        return max(range(len(rates)), key=rates.__getitem__)

    def another_level(self, chances: Sequence[float], ends: float, draft_ms: float) -> bool:
        """True if one more token pays.

        :param chances: of the draft tokens so far, and :param ends: the sum for those that it would follow.
        :param draft_ms: time of these levels, whether the request waits for them or not.
        """
        most_likely, right = sorted(chances, reverse=True), min(self.acceptance, MAX_CERTAINTY)
        count = self.best(most_likely, draft_ms=draft_ms)
        tokens = 1.0 + sum(most_likely[:count])
        rate = tokens / self._round_ms(count, draft_ms, ends)
        return (tokens + ends * right) / self._round_ms(count + 1, draft_ms + self.level_ms, ends * right) > rate

    def _round_ms(self, drafted: int, draft_ms: float, stands: float) -> float:
        """Time of a round among similar rounds. stands: chance that a whole draft is accepted."""
        sweep_ms = self.sweeps.ms(drafted)
        # a longer draft is accepted whole less often, and then the request waits for the next one
        return draft_ms + sweep_ms - (stands * min(draft_ms, sweep_ms) if self.hides else 0.0)


@dataclass(frozen=True)
class Draft:
    """Draft tokens after a text, a chain or a tree in depth-first order (`drafted_after`)."""

    tokens: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()  # the drafter's, that each is accepted if those before it on its branch are
    levels: int = 0  # tokens drafted one after another while the request waited
    compute_ms: float = 0.0  # of the drafter's arithmetic in that time

    @property
    def first(self) -> int:
        """Number of draft tokens in the first branch, which hosts keep if accepted."""
        return first_branch(self.depths)

    def kept(self, written: list[int]) -> int:
        """Number of accepted draft tokens of the first branch, if the tokens `written` follow."""
        pairs = zip(self.tokens[: self.first], written, strict=False)
        return next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), min(self.first, len(written)))


@dataclass(frozen=True)
class DraftPlan:
    """Length, number and breadth of the drafts to make."""

    most: int  # positions, one after another
    total: int | None = None  # tokens to draft; None = as many as pay
    branches: int = 1  # alternatives at one position, and branches to continue


@dataclass
class Growth:
    """Draft tokens, each with the one that it follows: `above`, -1 at the first position."""

    tokens: list[int] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    # The drafter's probability that each is accepted if those before it on its branch are.
    probs: list[float] = field(default_factory=list)
    # The chance that each is accepted with those before it, corrected by the drafter's record.
    chances: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [-1])  # draft tokens that the next level follows
    levels: int = 0
    waited: int = 0  # levels that the request waited for
    compute_ms: float = 0.0  # time of these levels

    def most_likely(self, count: int) -> list[int]:
        """The `count` likeliest draft tokens, none without those before it, depth first and likelier branches first."""
        kept = sorted(range(len(self.chances)), key=lambda i: -self.chances[i])[:count]  # stable: above comes before
        ordered, waiting = list[int](), [-1]
        while waiting:
            if (at := waiting.pop()) >= 0:
                ordered.append(at)
            waiting += [i for i in reversed(kept) if self.above[i] == at]
        return ordered

    def draft(self, sent: Sequence[int]) -> Draft:
        """Draft tokens from `most_likely` as a draft to send."""
        tokens, probs = tuple(self.tokens[at] for at in sent), tuple(self.probs[at] for at in sent)
        return Draft(tokens, tuple(map(self.depth, sent)), probs, self.waited, self.compute_ms)

    def depth(self, at: int) -> int:
        """Number of draft tokens before number `at` on its branch."""
        return len(self.branch(self.above[at]))

    def branch(self, at: int) -> list[int]:
        """The tokens of a branch up to number `at`; empty for -1."""
        tokens = list[int]()
        while at >= 0:
            tokens.insert(0, self.tokens[at])
            at = self.above[at]
        return tokens


# One rule decides length and width: the draft that yields the most tokens in the time of sweep and drafting.
# `branches` only bounds the choice: if alternatives do not pay, a chain is sent.
def chosen(growth: Growth, plan: DraftPlan, sizing: DraftLength) -> list[int]:
    """The draft to send: at least one token, to learn whether drafts are accepted."""
    paying = sizing.best(sorted(growth.chances, reverse=True)[:MAX_DRAFT_TREE], draft_ms=growth.compute_ms)
    return growth.most_likely(min(plan.total or max(paying, 1), MAX_DRAFT_TREE))
