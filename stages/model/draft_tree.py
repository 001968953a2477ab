"""Guesses after a text, one chain of them or a tree of the likeliest few: how many pay, and which are sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp

from stages.limits import MAX_DRAFT

MAX_DRAFT_TREE = 64  # guesses of a tree
DEFAULT_BRANCHES = 4  # grown where a request asks for no certain number: what does not pay of them is not sent
FORGET = 0.98  # weight of what was measured, at each further round
RECENT = 0.1  # weight of the last sweep among those whose times are known
A_GUESS_MS = 1.0  # what a guess adds to a sweep, as long as sweeps with more and with fewer were not compared
# And how much comparing it takes to believe otherwise: a sum of squared differences of guesses.
SPREAD = 40.0
MOST_SURE = 0.99
NOISE_STEP, LEAST_NOISE = 10.0, 0.01  # its logarithm grows by so much for each of the guesses tried that surprises


# A tree is read depth first, position by position. With a mask over all rows the order in which a kernel adds would
# depend on the tree, and a near tie could fall otherwise than in `ar`. Here the cache holds, when a draft token is
# computed, exactly what stands before it on its branch, so the result is the same to the last bit
# (tests/stages/host/test_draft_trees.py).
class DraftTree:
    """Guesses depth first: each is followed by what may come after it, as far as anything is guessed there.

    `depths`: how many guesses are before each on its own branch. A chain has depths 0, 1, 2 ...
    """

    def __init__(self, tokens: Sequence[int], depths: Sequence[int]) -> None:
        """The depths must be `in_order`."""
        self.tokens, self.depths = tokens, depths
        self._children = dict[tuple[int, int], int]()
        branch = list[int]()
        for at, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
            del branch[depth:]
            branch.append(self._children.setdefault((branch[-1] if branch else -1, token), at))

    def after(self, at: int, token: int) -> int:
        """The guess that `token` follows guess `at`, which is -1 for what was known; -1 where nobody guessed it."""
        return self._children.get((at, token), -1)


def are_depths(depths: Sequence[int]) -> bool:
    """True if these can be depths of a tree, each draft token but the first ones after another one."""
    before = -1
    for depth in depths:
        if not 0 <= depth <= before + 1:
            return False
        before = depth
    return True


def tree_positions(tokens: int, depths: Sequence[int]) -> tuple[int, int]:
    """Positions that so many new tokens take, the last of them a tree, whose branches take the same ones; and those of
    them that are kept: its first branch's."""
    before = tokens - len(depths)
    return before + max(depths) + 1, before + first_branch(depths)


def first_branch(depths: Sequence[int]) -> int:
    """Length of the first branch, which hosts remember."""
    return next((at for at, depth in enumerate(depths) if depth != at), len(depths))


class SweepTime:
    """Time of a sweep: a line over its guesses, for every host reads them all. Milliseconds."""

    def __init__(self) -> None:
        self._guesses, self._ms, self._is_new = 8.0, 100.0, True
        self._squares = self._products = 0.0  # of differences from the means of then

    def learn(self, guesses: int, ms: float) -> None:
        """Book a sweep."""
        if self._is_new:  # its distance from what was assumed is no price of a guess
            self._guesses, self._ms, self._is_new = float(guesses), ms, False
        apart, longer = guesses - self._guesses, ms - self._ms
        self._guesses += RECENT * apart
        self._ms += RECENT * longer
        # The price of a guess changes with the hosts, a sweep's time with every other load: it is remembered longer.
        self._squares = FORGET * self._squares + apart * apart
        self._products = FORGET * self._products + apart * longer

    @property
    def guess_ms(self) -> float:
        """Time that one more guess adds."""
        return max((self._products + SPREAD * A_GUESS_MS) / (self._squares + SPREAD), 0.0)

    def ms(self, guesses: int) -> float:
        """That of a sweep with so many."""
        return max(self._ms + self.guess_ms * (guesses - self._guesses), self._ms / 10)


class DraftLength:
    """Number of guesses that pays, from what was accepted and how long sweeps and drafting took so far.

    A round of guesses brings one token and those that stand, in the time of the drafting and of the sweep: what is
    guessed maximises the quotient (Leviathan et al. 2023, arXiv 2211.17192, equation 1; of trees: Li et al. 2024, arXiv
    2406.16858, who take the guesses that are likeliest with all before them).
    """

    def __init__(self, sweeps: SweepTime, hides: bool = False) -> None:
        """:param hides: where a draft stands, the next one was drafted while it was under way."""
        self.sweeps, self.hides = sweeps, hides
        self._right, self._tried = 3.0, 4.0  # as if 3 of 4 guesses had been right so far
        # What the model's sums of logits and Gumbel numbers differ by from the drafter's, in units of those: a copy
        # of the model is wrong at near ties alone, however random the text is.
        self.noise = 1.0
        self.level_ms = 1.0  # what drafting one token after another takes for each of them

    @property
    def acceptance(self) -> float:
        """Share of guesses found right, of those whose place was reached."""
        return self._right / self._tried

    def learn(self, guesses: int, accepted: int, told: float, levels: int, draft_ms: float) -> None:
        """Book a round.

        :param accepted: of the first branch, that is of `guesses` one after the other.
        :param told: sum of the probabilities that the drafter gave those whose place was reached.
        :param levels: tokens drafted one after the other while the request waited, in `draft_ms`.
        """
        if guesses:
            self._right = FORGET * self._right + accepted
            self._tried = FORGET * self._tried + accepted + (accepted < guesses)
            # larger by what was expected to stand and did not, and by less the more was tried
            change = min(max(NOISE_STEP * (told - accepted) / self._tried, -1.0), 1.0)
            self.noise = min(max(self.noise * exp(change), LEAST_NOISE), 1 / LEAST_NOISE)
        if levels:
            self.level_ms += 0.2 * (draft_ms / levels - self.level_ms)

    def length(self) -> int:
        """Guesses of a chain of which no more is known than `acceptance`."""
        a = min(self.acceptance, MOST_SURE)
        return self.best([a ** (i + 1) for i in range(MAX_DRAFT)], self.level_ms) or 1

    def best(self, chances: Sequence[float], each_ms: float = 0.0, draft_ms: float = 0.0) -> int:
        """Number of guesses to send.

        :param chances: that each stands with all before it, the likeliest first.
        :param each_ms: that drafting each one takes.
        :param draft_ms: that it took already.
        """
        tokens = accumulate(chances, initial=1.0)
        rates = [n / (draft_ms + i * each_ms + self.sweeps.ms(i)) for i, n in enumerate(tokens)]
        return max(range(len(rates)), key=rates.__getitem__)

    def another_level(self, chances: Sequence[float], ends: float, draft_ms: float) -> bool:
        """True where one token more pays.

        :param chances: of the guesses so far, and :param ends: of those that it would come after, in all.
        :param draft_ms: what these levels take, whether the request waits for them or not.
        """
        likeliest, right = sorted(chances, reverse=True), min(self.acceptance, MOST_SURE)
        count = self.best(likeliest, draft_ms=draft_ms)
        tokens = 1.0 + sum(likeliest[:count])
        rate = tokens / self._round_ms(count, draft_ms, ends)
        return (tokens + ends * right) / self._round_ms(count + 1, draft_ms + self.level_ms, ends * right) > rate

    def _round_ms(self, guesses: int, draft_ms: float, stands: float) -> float:
        """Time of a round among others like it. stands: chance that all of a draft stands."""
        sweep_ms = self.sweeps.ms(guesses)
        # the longer a draft, the more seldom it stands, and the next one is waited for
        return draft_ms + sweep_ms - (stands * min(draft_ms, sweep_ms) if self.hides else 0.0)


@dataclass(frozen=True)
class Draft:
    """Guesses of what follows a text, a chain or a tree of them, depth first (`DraftTree`)."""

    tokens: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()  # that each stands if those before it on its branch do, as who drafted has it
    levels: int = 0  # tokens that were drafted one after the other while the request waited
    compute_ms: float = 0.0  # of the drafter's arithmetic meanwhile

    @property
    def first(self) -> int:
        """Guesses of the first branch: those that hosts remember where they stand."""
        return first_branch(self.depths)

    def kept(self, written: list[int]) -> int:
        """Number of guesses of the first branch that stand, if that is written."""
        pairs = zip(self.tokens[: self.first], written, strict=False)
        return next((i for i, (guess, token) in enumerate(pairs) if guess != token), min(self.first, len(written)))


@dataclass(frozen=True)
class DraftPlan:
    """Length, number and breadth of the drafts to make."""

    most: int  # places, one after the other
    guesses: int | None = None  # in all; None = as many as pay
    branches: int = 1  # alternatives of one place, and branches that are gone on with


@dataclass
class Growth:
    """Guesses, each with the one that it comes after: `above`, -1 at the first place."""

    tokens: list[int] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    # That each stands if those before it on its branch do, as the drafter has it.
    probs: list[float] = field(default_factory=list)
    # That each stands with those before it, by what the drafter was found to be worth.
    chances: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [-1])  # those that the next level comes after
    levels: int = 0
    waited: int = 0  # levels that the request waited for
    compute_ms: float = 0.0  # that they took

    def likeliest(self, count: int) -> list[int]:
        """So many of them, none without those before it, depth first: likelier branches first."""
        kept = sorted(range(len(self.chances)), key=lambda i: -self.chances[i])[:count]  # stable: above comes before
        ordered, waiting = list[int](), [-1]
        while waiting:
            if (at := waiting.pop()) >= 0:
                ordered.append(at)
            waiting += [i for i in reversed(kept) if self.above[i] == at]
        return ordered

    def draft(self, sent: Sequence[int]) -> Draft:
        """Guesses of `likeliest` in the form in which they travel."""
        tokens, probs = tuple(self.tokens[at] for at in sent), tuple(self.probs[at] for at in sent)
        return Draft(tokens, tuple(map(self.depth, sent)), probs, self.waited, self.compute_ms)

    def depth(self, at: int) -> int:
        """Number of guesses before it on its branch."""
        return len(self.branch(self.above[at]))

    def branch(self, at: int) -> list[int]:
        """Its token after those before it on its branch; none for -1."""
        tokens = list[int]()
        while at >= 0:
            tokens.insert(0, self.tokens[at])
            at = self.above[at]
        return tokens


# One rule decides length and width: as many guesses as bring the most tokens for the time that sweep and drafting
# take. `branches` only bounds what is looked at: where alternatives do not pay, a chain is sent.
def chosen(growth: Growth, plan: DraftPlan, worth: DraftLength) -> list[int]:
    """The guesses to send: at least one, so that it is seen whether they stand."""
    paying = worth.best(sorted(growth.chances, reverse=True)[:MAX_DRAFT_TREE], draft_ms=growth.compute_ms)
    return growth.likeliest(min(plan.guesses or max(paying, 1), MAX_DRAFT_TREE))
