"""Grows guesses after a text: one chain of them, or a tree of the likeliest few."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.local import LocalText
from serving.worth import MOST_SURE, DraftWorth
from stages.alphabet import Alphabet
from stages.guesses import MAX_TREE
from stages.randomness import gumbels

MAX_BRANCHES = 8

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """What to guess."""

    most: int
    """Places, one after the other."""
    guesses: int | None = None
    """In all; None = as many as pay."""
    branches: int = 1
    """Alternatives of one place, and branches that are gone on with."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Once it is set, nobody wants the guesses any more."""


@dataclass
class Growth:
    """Guesses, each with the one that it comes after: `above`, -1 at the first place."""

    symbols: list[int] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    """That each stands if those before it on its branch do, as the drafter has it."""
    chances: list[float] = field(default_factory=list)
    """That each stands with those before it, by what the drafter was found to be worth."""
    levels: int = 0
    compute_ms: float = 0.0

    def likeliest(self, count: int) -> list[int]:
        """So many of them, none without those before it, depth first: likelier branches first."""
        kept = sorted(range(len(self.chances)), key=lambda i: -self.chances[i])[:count]  # stable: above comes before
        ordered, waiting = list[int](), [-1]
        while waiting:
            if (at := waiting.pop()) >= 0:
                ordered.append(at)
            waiting += [i for i in reversed(kept) if self.above[i] == at]
        return ordered

    def depth(self, at: int) -> int:
        """How many are before it on its branch."""
        depth = 0
        while (at := self.above[at]) >= 0:
            depth += 1
        return depth


class Grower:
    """Grows guesses for one request, with its own random numbers.

    The hosts add the request's Gumbel numbers to the logits of a place and take the largest sum. The drafter does the
    same with the same numbers (Daliri et al. 2024, arXiv 2408.07978): where both models agree they pick the same
    symbol, however random it is. The softmax of these sums tells how sure it is: as if the hosts' sums were its own
    with noise of the same kind. Of all guesses those are sent that are likeliest with all before them (Li et al. 2024,
    arXiv 2406.16858).
    """

    def __init__(self, text: LocalText, alphabet: Alphabet, temperature: float, seed: int, worth: DraftWorth) -> None:
        self.text, self.alphabet, self.worth = text, alphabet, worth
        self.temperature, self.seed = temperature, seed

    @torch.inference_mode()
    def grow(self, known: bytes, plan: Plan) -> Growth:
        """Guesses after `known`, more of them than will be sent. On the drafter's compute thread."""
        begin, growth, position = time.perf_counter(), Growth(), self.alphabet.count(known)
        nodes, forks = np.array([-1]), None
        logits = self.text.logits_after(known)
        while True:
            rows, nodes = self._add(growth, nodes, logits, position + growth.levels, plan.branches)
            growth.levels += 1
            growth.compute_ms = (time.perf_counter() - begin) * 1000
            if plan.given_up.is_set() or not self._goes_on(growth, nodes, plan):
                return growth
            if forks is None:
                forks = self.text.fork(len(nodes), plan.most - 1)
            else:
                forks.select(rows)
            logits = forks.read(np.array([growth.symbols[node] for node in nodes]))

    def _add(
        self, growth: Growth, nodes: Indices, logits: Tensor, position: int, width: int
    ) -> tuple[Indices, Indices]:
        """The likeliest few after each of `nodes`. Returns those to go on with: the rows that they follow, and they."""
        sums = logits.double().numpy()
        sums = sums - sums.max(axis=1, keepdims=True)
        if self.temperature > 0:
            with np.errstate(over="ignore"):
                sums = sums / self.temperature + gumbels(self.seed, position, 1, sums.shape[1])
            sums -= sums.max(axis=1, keepdims=True)
        width = min(width, sums.shape[1])
        symbols = np.argpartition(-sums, width - 1, axis=1)[:, :width]
        odds = np.take_along_axis(np.exp(sums), symbols, axis=1) / np.exp(sums).sum(axis=1, keepdims=True)
        before = np.array([growth.chances[node] if node >= 0 else 1.0 for node in nodes])
        chances = (np.minimum(odds * self.worth.trust, MOST_SURE) * before[:, None]).flatten()
        first = len(growth.symbols)
        growth.symbols += symbols.flatten().tolist()
        growth.above += nodes.repeat(width).tolist()
        growth.odds += odds.flatten().tolist()
        growth.chances += chances.tolist()
        best = np.argsort(-chances, kind="stable")[:width]
        return best // width, first + best

    def _goes_on(self, growth: Growth, nodes: Indices, plan: Plan) -> bool:
        if growth.levels >= plan.most:
            return False
        ends = [growth.chances[node] for node in nodes]
        if plan.guesses is None:
            return self.worth.another_level(growth.chances, sum(ends), growth.compute_ms)
        among = sorted(growth.chances, reverse=True)[: plan.guesses]
        return len(among) < plan.guesses or max(ends) > among[-1]


def chosen(growth: Growth, plan: Plan, worth: DraftWorth) -> list[int]:
    """The guesses to send: at least one, so that it is seen whether they stand."""
    paying = worth.best(sorted(growth.chances, reverse=True)[:MAX_TREE], draft_ms=growth.compute_ms)
    return growth.likeliest(min(plan.guesses or max(paying, 1), MAX_TREE))
