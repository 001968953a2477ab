"""Drafting on the host of the last stage, which is the first to know which draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.backends.whole_model import ModelChain, ModelText, WholeModel
from stages.clock import monotonic
from stages.limits import MAX_DRAFT
from stages.model.draft_tree import (
    DEFAULT_BRANCHES,
    MAX_CERTAINTY,
    Draft,
    DraftLength,
    DraftPlan,
    Growth,
    SweepTime,
    chosen,
)
from stages.model.randomness import gumbels
from stages.model.scoring import Tokens
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2

if TYPE_CHECKING:
    from stages.host.work.checks import SamplingPlan

Allowed = NDArray[np.bool_]  # for each token of the vocabulary, True if it can follow
AllowedAfter = Callable[[Sequence[int]], Allowed | None]  # the tokens that a grammar allows after a draft
# Fewest and most tokens that must match earlier text before its continuation is drafted; a token is several bytes.
MATCHED_BYTES, MATCHED_TOKENS = (4, 24), (2, 8)
AHEAD_CHANCE = 0.5  # if a draft is less likely to be accepted whole, drafting ahead would mostly be wasted


class TreeGrower:
    """Grows drafts for one request, with its own random numbers.

    The hosts add the request's Gumbel numbers to the logits at a position and take the largest sum. The drafter does
    the same with the same numbers (Daliri et al. 2024, arXiv 2408.07978): where both models agree they pick the same
    token, however random it is. The softmax of the drafter's sums estimates its confidence, as if the hosts' sums were
    its own plus noise of the same kind, whose scale is learnt. The tokens that are sent are the likeliest jointly with
    all draft tokens before them (Li et al. 2024, arXiv 2406.16858).
    """

    def __init__(
        self, text: ModelText, sizing: DraftLength, sampling: SamplingPlan, allowed: AllowedAfter | None = None
    ) -> None:
        """:param allowed: tokens that a grammar allows after a draft that follows the text; None without a grammar."""
        self.text, self.sizing, self.sampling, self.allowed = text, sizing, sampling, allowed
        self.vocabulary = text.model.vocabulary

    def grow(self, known: bytes, plan: DraftPlan) -> Growth:
        """Draft tokens after `known`, more of them than will be sent."""
        growth = Growth()
        self.finish(growth, self.levels(growth, known, plan), plan)
        return growth

    def finish(self, growth: Growth, levels: Iterator[bool], plan: DraftPlan) -> None:
        """Add `levels` to a growth while each still pays, since the request waits for them."""
        begin = monotonic()
        while self.should_grow(growth, plan) and next(levels, False):
            growth.waited += 1
            growth.compute_ms = (monotonic() - begin) * 1000

    @torch.inference_mode()
    def levels(self, growth: Growth, known: bytes, plan: DraftPlan) -> Iterator[bool]:
        """Grow a draft after `known`, one level with each `next`. Yields True."""
        position, nodes, forks = self.vocabulary.count(known), np.array([-1]), None
        logits, shaping = self.text.logits_after(known), self.sampling.shaping
        while True:
            if shaping.adjusts:
                before = [np.array(self.vocabulary.tokens(known) + growth.branch(node)) for node in nodes]
                pairs = zip(logits.split(1), before, strict=True)
                logits = torch.cat([shaping.adjusted(row, tokens) for row, tokens in pairs])
            rows, nodes = self._add(growth, nodes, logits, position + growth.levels, plan.branches)
            growth.levels, growth.ends = growth.levels + 1, nodes.tolist()
            yield True
            if forks is None:
                forks = ModelChain(self.text) if plan.branches == 1 else self.text.fork(len(nodes), plan.most - 1)
            else:
                forks.select(rows)
            logits = forks.read(np.array([growth.tokens[node] for node in nodes]))

    def _add(self, growth: Growth, nodes: Tokens, logits: Tensor, position: int, width: int) -> tuple[Tokens, Tokens]:
        """Add the few likeliest tokens after each node. Returns those to extend: their parents' rows, and them."""
        sums = logits.double().numpy()  # of float32, so a copy
        before = np.array([growth.chances[node] if node >= 0 else 1.0 for node in nodes])
        is_sure = self._hold(growth, nodes, sums, before)
        sums -= sums.max(axis=1, keepdims=True)
        if (asked := self.sampling).temperature > 0:
            with np.errstate(over="ignore"):
                sums = asked.shaping.filtered(sums / asked.temperature) + gumbels(
                    asked.seed, position, 1, sums.shape[1]
                )
            sums -= sums.max(axis=1, keepdims=True)
        width = min(width, sums.shape[1])
        tokens = torch.from_numpy(sums).topk(width, dim=1).indices.numpy()  # a fifth of np.argpartition's time
        exponentials = np.exp(sums / self.sizing.noise)
        probs = np.take_along_axis(exponentials, tokens, axis=1) / exponentials.sum(axis=1, keepdims=True)
        chances = np.where(is_sure[:, None], probs, np.minimum(probs, MAX_CERTAINTY))
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
        self, growth: Growth, nodes: Tokens, sums: NDArray[np.float64], before: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Hold the tokens after `nodes` to a grammar, in place. Returns the nodes that only one token can follow.

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

    def should_grow(self, growth: Growth, plan: DraftPlan) -> bool:
        """True where one more level pays."""
        if growth.levels >= plan.most or not growth.ends:
            return False
        if not growth.levels:
            return True
        ends = [growth.chances[node] for node in growth.ends]
        if plan.total is None:
            return self.sizing.another_level(growth.chances, sum(ends), growth.levels * self.sizing.level_ms)
        among = sorted(growth.chances, reverse=True)[: plan.total]
        return len(among) < plan.total or max(ends) > among[-1]


class RunAhead:
    """The draft after the one under way, if all of that is accepted: a chain, grown while no request waits for it.

    Runs on the compute thread only.
    """

    def __init__(self, grower: TreeGrower, drafted: Tokens, plan: DraftPlan) -> None:
        """:param drafted: the text, with the draft that is under way.
        :param plan: the plan of the draft after that."""
        self.grower, self.plan, self.growth = grower, plan, Growth()
        self._expected = drafted
        self._levels: Iterator[bool] | None = None  # set once the token that verification adds is drafted

    def step(self) -> bool:
        """Draft one token; False where further tokens would not be sent."""
        if self._levels is None:
            encode = self.grower.vocabulary.encode
            own = self.grower.grow(encode(self._expected), DraftPlan(1))  # verification adds a token of the model's own
            self._expected = np.append(self._expected, own.tokens)
            self._levels = self.grower.levels(self.growth, encode(self._expected), self.plan)
            return True
        return self.grower.should_grow(self.growth, self.plan) and next(self._levels, False)

    def after(self, known: Tokens, plan: DraftPlan) -> Growth | None:
        """Draft tokens after `known`, with the levels worth waiting for; None if another text was expected."""
        if self._levels is None or self.growth.levels > plan.most or not np.array_equal(known, self._expected):
            return None
        self.grower.finish(self.growth, self._levels, plan)
        return self.growth


@dataclass
class DraftState:
    """State of a drafter in one session."""

    text: ModelText | None  # the text as read by the drafter's model; None without a model
    sizing: DraftLength  # the record that set the length of the last draft
    draft: Draft = field(default_factory=Draft)  # the last one
    left_at: float = 0.0
    # The draft that follows, where it is drafted before verification.
    ahead: RunAhead | None = None


class Drafter:
    """Drafts for the sessions of one model. Runs on the compute thread only.

    Drafts decide how long a text takes, never the text itself: results here may depend on what shares a batch.
    """

    def __init__(self, vocabulary: Vocabulary, model: WholeModel | None = None) -> None:
        """:param model: a model of the same tokens: a copy in fewer bits, or a smaller one. Without one, a draft
        repeats what followed an earlier match in the text."""
        self.vocabulary, self.model = vocabulary, model
        # A grammar leaves few tokens at most positions, so drafts are accepted more often.
        self.sweeps = SweepTime()
        self.free, self.held = DraftLength(self.sweeps, hides=model is not None), DraftLength(self.sweeps)

    def begin(self, capacity: int) -> DraftState:
        """State for a session of `capacity` positions."""
        model = self.model
        return DraftState(None if model is None else model.open(min(capacity, model.positions)), self.free)

    def session_bytes(self, capacity: int) -> int:
        """Memory of a session of `capacity` positions."""
        return 0 if self.model is None else self.model.text_bytes(min(capacity, self.model.positions))

    @torch.inference_mode()
    def read(self, state: DraftState, known: Tokens) -> None:
        """Read all tokens of a text but the last, which is read with the first draft after it."""
        if state.text is not None and len(known) <= state.text.capacity:
            state.text.read_on(self.vocabulary.encode(known[:-1]))

    @torch.inference_mode()
    def draft(
        self,
        state: DraftState,
        known: Tokens,
        left: int,
        limits: stage_pb2.Drafting,
        sampling: SamplingPlan,
        allowed: AllowedAfter | None = None,
    ) -> Draft:
        """Draft tokens after a text.

        :param known: all tokens of the text.
        :param left: tokens still to write.
        :param allowed: the tokens that a grammar allows after a draft that follows the text.
        """
        self.read(state, known)
        begin = monotonic()
        if state.left_at and state.draft.tokens:
            self.sweeps.learn(len(state.draft.tokens), (begin - state.left_at) * 1000)
        state.draft, state.sizing = Draft(), self.free if allowed is None else self.held
        if left > 1:
            plan = DraftPlan(
                min(left - 1, MAX_DRAFT), min(limits.most, left - 1) or None, limits.branches or DEFAULT_BRANCHES
            )
            state.draft = self.drafted(state, known, plan, sampling, allowed)
        state.left_at = monotonic()
        return state.draft

    def drafted(
        self, state: DraftState, known: Tokens, plan: DraftPlan, sampling: SamplingPlan, allowed: AllowedAfter | None
    ) -> Draft:
        ahead, state.ahead, text, sizing = state.ahead, None, state.text, state.sizing
        if text is None:
            found = prompt_lookup(known, self.vocabulary, min(plan.total or sizing.length(), plan.most))
            return Draft(found, tuple(range(len(found))), (sizing.acceptance,) * len(found))
        if (room := text.capacity - len(known)) < 1:
            return Draft()
        plan, grower = replace(plan, most=min(plan.most, room)), TreeGrower(text, sizing, sampling, allowed)
        growth = ahead.after(known, replace(plan, branches=1)) if ahead is not None else None
        growth = growth or grower.grow(self.vocabulary.encode(known), plan)
        draft = growth.draft(chosen(growth, plan, sizing))
        # the last token of a text is never read, so the room left is for all remaining tokens but one
        room -= draft.first + 1
        if room > 0 and allowed is None and sizing.acceptance**draft.first >= AHEAD_CHANCE:
            drafted = np.append(known, draft.tokens[: draft.first])
            state.ahead = RunAhead(grower, drafted, replace(plan, most=min(room, MAX_DRAFT), branches=1))
        return draft

    def learn(self, state: DraftState, written: list[int]) -> None:
        """Book how much of the last draft the hosts accepted. written: the tokens that the step wrote."""
        draft = state.draft
        kept = draft.kept(written[:-1])
        state.sizing.learn(draft.first, kept, sum(draft.probs[: kept + 1]), draft.levels, draft.compute_ms)


def prompt_lookup(known: Tokens, vocabulary: Vocabulary, count: int) -> tuple[int, ...]:
    """At most `count` tokens that followed the last time that a text ended like `known`."""
    least, most = MATCHED_BYTES if vocabulary == BYTES else MATCHED_TOKENS
    for length in range(min(most, len(known) - 1), least - 1, -1):
        # all runs of `length` tokens that end before the last token
        runs = np.lib.stride_tricks.sliding_window_view(known[:-1], length)
        if len(found := np.flatnonzero((runs == known[-length:]).all(axis=1))):
            return tuple(known[found[-1] + length :][:count].tolist())
    return ()
