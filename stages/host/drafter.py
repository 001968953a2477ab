"""Drafts on the host of the last stage, which has the verdict first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from stages.backends.whole_model import ModelText, WholeModel
from stages.limits import MAX_DRAFT
from stages.model.draft_tree import (
    DEFAULT_BRANCHES,
    Allowed,
    Draft,
    DraftLength,
    DraftPlan,
    Growth,
    SweepTime,
    TreeGrower,
    chosen,
)
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2

if TYPE_CHECKING:
    from stages.host.work.base import SamplingPlan

Tokens = NDArray[np.int64]
AllowedAfter = Callable[[Sequence[int]], Allowed | None]  # by a grammar, the tokens that can follow guesses
# Fewest and most tokens that must have been seen before to expect the same continuation; a token is several bytes.
MATCHED_BYTES, MATCHED_TOKENS = (4, 24), (2, 8)
AHEAD_CHANCE = 0.5  # nothing is drafted ahead after a draft that stands more seldom: most of it would be in vain


class RunAhead:
    """The draft after one that is under way, as if all of that stood: a chain, grown while nobody waits for it.

    On the compute thread only.
    """

    def __init__(self, grower: TreeGrower, drafted: Tokens, plan: DraftPlan) -> None:
        """:param drafted: the text with the draft under way.
        :param plan: of the draft after it."""
        self.grower, self.plan, self.growth = grower, plan, Growth()
        self._expected = drafted
        self._levels: Iterator[bool] | None = None  # once the token of the verdict was guessed

    def step(self) -> bool:
        """Draft one token; False where no more of them would be sent."""
        if self._levels is None:
            encode = self.grower.vocabulary.encode
            own = self.grower.grow(encode(self._expected), DraftPlan(1))  # the verdict adds a token of the model's own
            self._expected = np.append(self._expected, own.tokens)
            self._levels = self.grower.levels(self.growth, encode(self._expected), self.plan)
            return True
        return self.grower.goes_on(self.growth, self.plan) and next(self._levels, False)

    def after(self, known: Tokens, plan: DraftPlan) -> Growth | None:
        """Guesses of what follows `known`, with those that it pays to wait for; None if another text was expected."""
        if self._levels is None or self.growth.levels > plan.most or not np.array_equal(known, self._expected):
            return None
        self.grower.finish(self.growth, self._levels, plan)
        return self.growth


@dataclass
class DraftState:
    """State of a drafter in one session."""

    text: ModelText | None  # as the drafter's model reads it; None where it has none
    worth: DraftLength  # by whose record the last draft was cut
    draft: Draft = field(default_factory=Draft)  # the last one
    left_at: float = 0.0
    # What comes after it, where that is drafted before the verdict.
    ahead: RunAhead | None = None


class Drafter:
    """Drafts for the sessions of one model. On the compute thread only.

    What it drafts decides how long a text takes, never the text: nothing here need be the same in any company.
    """

    def __init__(self, vocabulary: Vocabulary, model: WholeModel | None = None) -> None:
        """:param model: of the same tokens, a copy of the model in fewer bits or a smaller one. Without one, a draft is
        what followed an earlier place like this one."""
        self.vocabulary, self.model = vocabulary, model
        # A grammar leaves few tokens at most places: guesses are right more often there.
        self.sweeps = SweepTime()
        self.free, self.held = DraftLength(self.sweeps, hides=model is not None), DraftLength(self.sweeps)

    def begin(self, capacity: int) -> DraftState:
        """For a session of `capacity` positions."""
        model = self.model
        return DraftState(None if model is None else model.open(min(capacity, model.positions)), self.free)

    def session_bytes(self, capacity: int) -> int:
        """Memory of a session of `capacity` positions."""
        return 0 if self.model is None else self.model.text_bytes(min(capacity, self.model.positions))

    @torch.inference_mode()
    def read(self, state: DraftState, known: Tokens) -> None:
        """Read a text, all but its last token: that is read with the first draft after it."""
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
        :param allowed: by a grammar, tokens that can follow guesses after the text.
        """
        self.read(state, known)
        begin = time.perf_counter()
        if state.left_at and state.draft.tokens:
            self.sweeps.learn(len(state.draft.tokens), (begin - state.left_at) * 1000)
        state.draft, state.worth = Draft(), self.free if allowed is None else self.held
        if left > 1:
            plan = DraftPlan(
                min(left - 1, MAX_DRAFT), min(limits.most, left - 1) or None, limits.branches or DEFAULT_BRANCHES
            )
            state.draft = self.guesses(state, known, plan, sampling, allowed)
        state.left_at = time.perf_counter()
        return state.draft

    def guesses(
        self, state: DraftState, known: Tokens, plan: DraftPlan, sampling: SamplingPlan, allowed: AllowedAfter | None
    ) -> Draft:
        """Guesses of what comes after `known`."""
        ahead, state.ahead, text, worth = state.ahead, None, state.text, state.worth
        if text is None:
            found = looked_up(known, self.vocabulary, min(plan.guesses or worth.length(), plan.most))
            return Draft(found, tuple(range(len(found))), (worth.acceptance,) * len(found))
        if (room := text.capacity - len(known)) < 1:
            return Draft()
        plan, shaping = replace(plan, most=min(plan.most, room)), sampling.shaping
        grower = TreeGrower(text, self.vocabulary, worth, sampling.temperature, sampling.seed, shaping, allowed)
        growth = ahead.after(known, replace(plan, branches=1)) if ahead is not None else None
        growth = growth or grower.grow(self.vocabulary.encode(known), plan)
        draft = growth.draft(chosen(growth, plan, worth))
        # the text's last token is not read, so that it has room for those that are still to be written, but one
        room -= draft.first + 1
        if room > 0 and allowed is None and worth.acceptance**draft.first >= AHEAD_CHANCE:
            drafted = np.append(known, draft.tokens[: draft.first])
            state.ahead = RunAhead(grower, drafted, replace(plan, most=min(room, MAX_DRAFT), branches=1))
        return draft

    def learn(self, state: DraftState, written: list[int]) -> None:
        """Book what the hosts made of the last draft. written: the tokens that came of it."""
        draft = state.draft
        kept = draft.kept(written[:-1])
        state.worth.learn(draft.first, kept, sum(draft.probs[: kept + 1]), draft.levels, draft.compute_ms)


def looked_up(known: Tokens, vocabulary: Vocabulary, count: int) -> tuple[int, ...]:
    """At most `count` tokens that followed the last time that a text ended like `known`."""
    least, most = MATCHED_BYTES if vocabulary == BYTES else MATCHED_TOKENS
    for length in range(min(most, len(known) - 1), least - 1, -1):
        # where each run of so many tokens before the last one begins
        runs = np.lib.stride_tricks.sliding_window_view(known[:-1], length)
        if len(found := np.flatnonzero((runs == known[-length:]).all(axis=1))):
            return tuple(known[found[-1] + length :][:count].tolist())
    return ()
