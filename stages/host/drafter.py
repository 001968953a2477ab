"""Drafters on the host of the last stage, which has the verdict and the hidden states first."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stages.backends.base import CleanPiece
from stages.backends.packed import Growing, GrowingPiece, PackedNorm
from stages.backends.packed_llama import packed_stage, product
from stages.backends.whole_model import ModelText, WholeModel
from stages.checkpoint.draft_head import DraftHead
from stages.limits import MAX_DRAFT
from stages.model.draft_tree import (
    DEFAULT_BRANCHES,
    Allowed,
    Draft,
    DraftLength,
    DraftPlan,
    Forks,
    Growth,
    LocalText,
    SweepTime,
    TreeGrower,
    chosen,
)
from stages.model.layers import LayerCache, round_linears
from stages.model.pipeline import cache_bytes, new_caches
from stages.model.prefill import split_reads
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2

if TYPE_CHECKING:
    from stages.host.work.checks import SamplingPlan

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

    # The last draft, when it left, and by whose record it was cut.
    draft: Draft = field(default_factory=Draft)
    worth: DraftLength | None = None
    left_at: float = 0.0
    # What comes after it, where that is drafted before the verdict.
    ahead: RunAhead | None = None


class Drafter(ABC):
    """Drafts for the sessions of one model. On the compute thread only.

    What it drafts decides how long a text takes, never the text: nothing here need be the same in any company.
    """

    def __init__(self, vocabulary: Vocabulary, runs_ahead: bool = False) -> None:
        self.vocabulary = vocabulary
        # A grammar leaves few tokens at most places: guesses are right more often there.
        self.sweeps = SweepTime()
        self.free, self.held = DraftLength(self.sweeps, hides=runs_ahead), DraftLength(self.sweeps)

    @abstractmethod
    def begin(self, capacity: int, origin: int) -> DraftState:
        """For a session whose first hop brings tokens from `origin` on."""

    @abstractmethod
    def read(self, state: DraftState, start: int, hidden: Tensor, known: Tokens) -> None:
        """Read places from position `start` on; what was read from there on before is forgotten.

        :param hidden: the model's states at the places, (places, width), as they come out of its last layer.
        :param known: all tokens of the text up to the last place, and the one after it where it is known.
        """

    @abstractmethod
    def guesses(
        self, state: DraftState, known: Tokens, plan: DraftPlan, sampling: SamplingPlan, allowed: AllowedAfter | None
    ) -> Draft:
        """Guesses of what comes after `known`."""

    @abstractmethod
    def session_bytes(self, capacity: int) -> int:
        """Memory of a session of `capacity` positions."""

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
        """Draft tokens after a text that was read, all but its last token.

        :param known: all tokens of the text.
        :param left: tokens still to write.
        :param allowed: by a grammar, tokens that can follow guesses after the text.
        """
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

    def learn(self, state: DraftState, written: list[int]) -> None:
        """Book what the hosts made of the last draft. written: the tokens that came of it."""
        draft = state.draft
        kept = draft.kept(written[:-1])
        if state.worth is not None:
            state.worth.learn(draft.first, kept, sum(draft.probs[: kept + 1]), draft.levels, draft.compute_ms)


class LookupDrafter(Drafter):
    """Guesses what followed the last time that the text ended like this."""

    def begin(self, capacity: int, origin: int) -> DraftState:
        return DraftState()

    def read(self, state: DraftState, start: int, hidden: Tensor, known: Tokens) -> None:
        pass

    def guesses(
        self, state: DraftState, known: Tokens, plan: DraftPlan, sampling: SamplingPlan, allowed: AllowedAfter | None
    ) -> Draft:
        worth = state.worth or self.free
        count = min(plan.guesses or worth.length(), plan.most)
        least, most = MATCHED_BYTES if self.vocabulary == BYTES else MATCHED_TOKENS
        for length in range(min(most, len(known) - 1), least - 1, -1):
            # where each run of so many tokens before the last one begins
            runs = np.lib.stride_tricks.sliding_window_view(known[:-1], length)
            if len(found := np.flatnonzero((runs == known[-length:]).all(axis=1))):
                after = known[found[-1] + length :][:count].tolist()
                return Draft(tuple(after), tuple(range(len(after))), (worth.acceptance,) * len(after))
        return Draft()

    def session_bytes(self, capacity: int) -> int:
        return 0


class TreeDrafter(Drafter):
    """Grows a tree of the likeliest continuations of a text that it reads."""

    tokens: Tokens | None = None  # those that it can guess; None for all

    @abstractmethod
    def text_of(self, state: DraftState) -> LocalText | None:
        """The text that was read; None where it was not."""

    def guesses(
        self, state: DraftState, known: Tokens, plan: DraftPlan, sampling: SamplingPlan, allowed: AllowedAfter | None
    ) -> Draft:
        if (text := self.text_of(state)) is None:
            return Draft()
        ahead, state.ahead, worth = state.ahead, None, state.worth or self.free
        grower = TreeGrower(
            text,
            self.vocabulary,
            worth,
            sampling.temperature,
            sampling.seed,
            sampling.shaping,
            tokens=self.tokens,
            allowed=allowed,
        )
        growth = ahead.after(known, replace(plan, branches=1)) if ahead is not None else None
        growth = growth or grower.grow(self.vocabulary.encode(known), plan)
        draft = growth.draft(chosen(growth, plan, worth))
        if allowed is None and worth.acceptance**draft.first >= AHEAD_CHANCE:
            state.ahead = self.run_ahead(state, grower, np.append(known, draft.tokens[: draft.first]), plan)
        return draft

    def run_ahead(self, state: DraftState, grower: TreeGrower, drafted: Tokens, plan: DraftPlan) -> RunAhead | None:
        """Begin what comes after a draft. None where the drafter has no text without the model's own states."""
        return None


@dataclass(kw_only=True)
class ModelDraftState(DraftState):
    """That of a whole model."""

    text: ModelText


class ModelDrafter(TreeDrafter):
    """A whole model of the same tokens: a copy of the served one in fewer bits, or a smaller one."""

    def __init__(self, model: WholeModel) -> None:
        super().__init__(model.vocabulary, runs_ahead=True)
        self.model = model

    def begin(self, capacity: int, origin: int) -> ModelDraftState:
        return ModelDraftState(text=self.model.open(min(capacity, self.model.positions)))

    @torch.inference_mode()
    def read(self, state: DraftState, start: int, hidden: Tensor, known: Tokens) -> None:
        assert isinstance(state, ModelDraftState)
        if len(known) <= self.model.positions:
            state.text.read_on(self.vocabulary.encode(known[:-1]))

    def guesses(
        self, state: DraftState, known: Tokens, plan: DraftPlan, sampling: SamplingPlan, allowed: AllowedAfter | None
    ) -> Draft:
        assert isinstance(state, ModelDraftState)
        room = state.text.capacity - len(known)
        if room < 1:
            return Draft()
        return super().guesses(state, known, replace(plan, most=min(plan.most, room)), sampling, allowed)

    def run_ahead(self, state: DraftState, grower: TreeGrower, drafted: Tokens, plan: DraftPlan) -> RunAhead | None:
        assert isinstance(state, ModelDraftState)
        # the text's last token is not read, so that it has room for those that are still to be written, but one
        room = state.text.capacity - len(drafted) - 1
        return RunAhead(grower, drafted, replace(plan, most=min(room, MAX_DRAFT), branches=1)) if room > 0 else None

    def text_of(self, state: DraftState) -> LocalText | None:
        assert isinstance(state, ModelDraftState)
        return state.text

    def session_bytes(self, capacity: int) -> int:
        return self.model.text_bytes(min(capacity, self.model.positions))


@dataclass(kw_only=True)
class HeadDraftState(DraftState):
    """That of a draft head: how far it has read the text."""

    caches: list[LayerCache]
    # Position of the first place that was read: the head does not read what a host had in memory of a text.
    origin: int
    # The model's state at the last place, as long as the token after it is not known: (1, width).
    unread: Tensor | None = None
    # Output of the head at the last place that it read, (1, width).
    last: Tensor | None = None


class HeadDrafter(TreeDrafter):
    """A few layers that go on from the model's own hidden states."""

    def __init__(self, head: DraftHead, model_head: Tensor) -> None:
        """:param model_head: the model's own, (vocabulary, width); a copy in 16 bits is kept, for it embeds tokens."""
        super().__init__(Vocabulary(len(model_head)))
        self.tokens = head.tokens.numpy().astype(np.int64)
        self.embedding = model_head.half()
        self.norms = tuple(map(PackedNorm, (head.model_norm, head.state_norm, head.token_norm)))
        self.architecture = head.stage.architecture
        assert isinstance(head.stage.head, nn.Linear)
        head.stage.head.weight = nn.Parameter(model_head[head.tokens.long()], requires_grad=False)
        round_linears(head)
        self.join, self.runner = product(head.join), packed_stage(head.stage)

    def begin(self, capacity: int, origin: int) -> HeadDraftState:
        caches = new_caches(self.architecture.layers_in(1), self.architecture, capacity)
        return HeadDraftState(caches=caches, origin=origin)

    @torch.inference_mode()
    def read(self, state: DraftState, start: int, hidden: Tensor, known: Tokens) -> None:
        assert isinstance(state, HeadDraftState)
        states = self.norms[0](hidden)
        if state.unread is not None and state.origin + state.caches[0].length < start:
            states, start = torch.cat([state.unread, states]), start - 1
        following = known[start + 1 :]
        for cache in state.caches:
            cache.length = start - state.origin
        count = len(following)
        state.unread = states[count:].clone() if count < len(states) else None
        if not count:
            return
        for piece in split_reads(self.joined(states[:count], torch.from_numpy(following))):
            (read,) = self.runner.read([CleanPiece(piece, state.caches)])
            state.last = read[-1:]

    def text_of(self, state: DraftState) -> LocalText | None:
        assert isinstance(state, HeadDraftState)
        return None if state.last is None else _HeadText(self, state, state.last)

    def session_bytes(self, capacity: int) -> int:
        return cache_bytes(self.architecture.layers_in(1), self.architecture, capacity)

    def joined(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Input of the layers: (places, width)."""
        embedded = self.norms[2](self.embedding[tokens].float())
        return self.join(torch.cat([embedded, self.norms[1](states)], dim=1))


class _HeadText(LocalText):
    """A text of which everything known was read."""

    def __init__(self, drafter: HeadDrafter, state: HeadDraftState, last: Tensor) -> None:
        self.drafter, self.state, self.last = drafter, state, last

    def logits_after(self, text: bytes) -> Tensor:
        return self.drafter.runner.next_byte([self.last])[0]

    def fork(self, count: int, room: int) -> Forks:
        grown = self.drafter.runner.fork(self.state.caches, room, count)
        return _HeadForks(self.drafter, grown, self.last.expand(count, -1))


class _HeadForks(Forks):
    """states: what the layers gave at the place before, (continuations, width)."""

    def __init__(self, drafter: HeadDrafter, grown: Growing, states: Tensor) -> None:
        self.drafter, self.grown, self.states = drafter, grown, states

    def read(self, tokens: NDArray[np.int64]) -> Tensor:
        joined = self.drafter.joined(self.states, torch.from_numpy(tokens))
        (self.states,) = self.drafter.runner.grow([GrowingPiece(joined, self.grown)])
        return self.drafter.runner.next_byte([self.states])[0]

    def select(self, branches: NDArray[np.int64]) -> None:
        rows = torch.from_numpy(branches)
        self.grown.select(rows)
        self.states = self.states.index_select(0, rows)
