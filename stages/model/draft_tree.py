"""Grows guesses after a text: one chain of them, or a tree of the likeliest few."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.limits import MAX_DRAFT
from stages.model.randomness import gumbels
from stages.model.scoring import PLAIN, Shaping
from stages.model.speculation import MAX_DRAFT_TREE, first_branch
from stages.model.vocabulary import Vocabulary

Indices = NDArray[np.int64]
Allowed = NDArray[np.bool_]
DEFAULT_BRANCHES = 4  # grown where a request asks for no certain number: what does not pay of them is not sent
FORGET = 0.98  # weight of what was measured, at each further round
RECENT = 0.1  # weight of the last sweep among those whose times are known
A_GUESS_MS = 1.0  # what a guess adds to a sweep, as long as sweeps with more and with fewer were not compared
# And how much comparing it takes to believe otherwise: a sum of squared differences of guesses.
SPREAD = 40.0
MOST_SURE = 0.99
NOISE_STEP, LEAST_NOISE = 10.0, 0.01  # its logarithm grows by so much for each of the guesses tried that surprises


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
        hidden_ms = stands * min(draft_ms, sweep_ms) if self.hides else 0.0
        return draft_ms + sweep_ms - hidden_ms


@dataclass(frozen=True)
class Draft:
    """Guesses of what follows a text, a chain or a tree of them, depth first (stages/model/speculation.py)."""

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


class Forks(ABC):
    """Continuations of one text that grow together, a token of each at a time. On the compute thread only."""

    @abstractmethod
    def read(self, tokens: NDArray[np.int64]) -> Tensor:
        """The next token of each (count,); logits (count, vocabulary) of what follows it."""

    @abstractmethod
    def select(self, branches: NDArray[np.int64]) -> None:
        """Go on with these: any of them, any number of times. branches: indices."""


class LocalText(ABC):
    """One text that a model reads. On the compute thread only."""

    @abstractmethod
    def logits_after(self, text: bytes) -> Tensor:
        """Logits (1, vocabulary) float32 of what follows `text`: tokens in their encoding, one at least.

        It may differ from what was read before, which costs no more than reading on from where they part.
        """

    @abstractmethod
    def fork(self, count: int, room: int) -> Forks:
        """Begin `count` continuations, of at most `room` tokens, of the text that `logits_after` was asked for last.

        They are good until it is asked again.
        """

    @abstractmethod
    def chain(self, room: int) -> Forks:
        """The same for one continuation that stays the only one."""


class TreeGrower:
    """Grows guesses for one request, with its own random numbers.

    The hosts add the request's Gumbel numbers to the logits of a place and take the largest sum. The drafter does the
    same with the same numbers (Daliri et al. 2024, arXiv 2408.07978): where both models agree they pick the same
    token, however random it is. The softmax of these sums tells how sure it is: as if the hosts' sums were its own
    with noise of the same kind, whose scale is learnt. Of all guesses those are sent that are likeliest with all before
    them (Li et al. 2024, arXiv 2406.16858).
    """

    def __init__(
        self,
        text: LocalText,
        vocabulary: Vocabulary,
        worth: DraftLength,
        temperature: float,
        seed: int,
        shaping: Shaping = PLAIN,
        allowed: Callable[[Sequence[int]], Allowed | None] | None = None,
    ) -> None:
        """:param allowed: by a grammar, which tokens of all can follow guesses after the text; None where none can."""
        self.text, self.vocabulary, self.worth, self.allowed = text, vocabulary, worth, allowed
        self.temperature, self.seed, self.shaping = temperature, seed, shaping

    def grow(self, known: bytes, plan: DraftPlan) -> Growth:
        """Guesses after `known`, more of them than will be sent. On the drafter's compute thread."""
        growth = Growth()
        self.finish(growth, self.levels(growth, known, plan), plan)
        return growth

    def finish(self, growth: Growth, levels: Iterator[bool], plan: DraftPlan) -> None:
        """Take `levels` of a growth while they pay for a request that waits."""
        begin = time.perf_counter()
        while self.goes_on(growth, plan) and next(levels, False):
            growth.waited += 1
            growth.compute_ms = (time.perf_counter() - begin) * 1000

    @torch.inference_mode()
    def levels(self, growth: Growth, known: bytes, plan: DraftPlan) -> Iterator[bool]:
        """Grow guesses after `known`, one level with each `next`. Yields True."""
        position, nodes, forks = self.vocabulary.count(known), np.array([-1]), None
        logits = self.text.logits_after(known)
        while True:
            if self.shaping.adjusts:
                before = [np.array(self.vocabulary.tokens(known) + growth.branch(node)) for node in nodes]
                pairs = zip(logits.split(1), before, strict=True)
                logits = torch.cat([self.shaping.adjusted(row, tokens) for row, tokens in pairs])
            rows, nodes = self._add(growth, nodes, logits, position + growth.levels, plan.branches)
            growth.levels, growth.ends = growth.levels + 1, nodes.tolist()
            yield True
            if forks is None:
                room = plan.most - 1
                forks = self.text.chain(room) if plan.branches == 1 else self.text.fork(len(nodes), room)
            else:
                forks.select(rows)
            logits = forks.read(np.array([growth.tokens[node] for node in nodes]))

    def _add(
        self, growth: Growth, nodes: Indices, logits: Tensor, position: int, width: int
    ) -> tuple[Indices, Indices]:
        """The likeliest few after each of `nodes`. Returns those to go on with: the rows that they follow, and they."""
        sums = logits.double().numpy()  # of float32, so a copy
        before = np.array([growth.chances[node] if node >= 0 else 1.0 for node in nodes])
        is_sure = self._hold(growth, nodes, sums, before)
        sums -= sums.max(axis=1, keepdims=True)
        if self.temperature > 0:
            with np.errstate(over="ignore"):
                sums = self.shaping.filtered(sums / self.temperature) + gumbels(self.seed, position, 1, sums.shape[1])
            sums -= sums.max(axis=1, keepdims=True)
        width = min(width, sums.shape[1])
        tokens = torch.from_numpy(sums).topk(width, dim=1).indices.numpy()  # a fifth of np.argpartition's time
        exponentials = np.exp(sums / self.worth.noise)
        probs = np.take_along_axis(exponentials, tokens, axis=1) / exponentials.sum(axis=1, keepdims=True)
        chances = np.where(is_sure[:, None], probs, np.minimum(probs, MOST_SURE))
        chances = (chances * before[:, None]).flatten()
        first = len(growth.tokens)
        growth.tokens += tokens.flatten().tolist()
        growth.above += nodes.repeat(width).tolist()
        growth.probs += probs.flatten().tolist()
        growth.chances += chances.tolist()
        best = np.argsort(-chances, kind="stable")[:width]
        best = best[chances[best] > 0]
        return best // width, first + best

    def _hold(
        self, growth: Growth, nodes: Indices, sums: NDArray[np.float64], before: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Hold the guesses after `nodes` to a grammar, in place. Returns after which one token alone can follow.

        :param sums: -inf afterwards for tokens that cannot follow.
        :param before: chances of the nodes; 0 afterwards where nothing can follow.
        """
        is_sure = np.zeros(len(nodes), dtype=bool)
        if self.allowed is None:
            return is_sure
        for i, node in enumerate(nodes):
            if (allowed := self.allowed(growth.branch(node))) is None:
                before[i] = 0.0
            else:
                sums[i, ~allowed], is_sure[i] = -np.inf, np.count_nonzero(allowed) == 1
        return is_sure

    def goes_on(self, growth: Growth, plan: DraftPlan) -> bool:
        """True where one more level pays."""
        if growth.levels >= plan.most or not growth.ends:
            return False
        if not growth.levels:
            return True
        ends = [growth.chances[node] for node in growth.ends]
        if plan.guesses is None:
            return self.worth.another_level(growth.chances, sum(ends), growth.levels * self.worth.level_ms)
        among = sorted(growth.chances, reverse=True)[: plan.guesses]
        return len(among) < plan.guesses or max(ends) > among[-1]


# One rule decides length and width: as many guesses as bring the most tokens for the time that sweep and drafting
# take. `branches` only bounds what is looked at: where alternatives do not pay, a chain is sent.
def chosen(growth: Growth, plan: DraftPlan, worth: DraftLength) -> list[int]:
    """The guesses to send: at least one, so that it is seen whether they stand."""
    paying = worth.best(sorted(growth.chances, reverse=True)[:MAX_DRAFT_TREE], draft_ms=growth.compute_ms)
    return growth.likeliest(min(plan.guesses or max(paying, 1), MAX_DRAFT_TREE))
