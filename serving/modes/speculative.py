"""`ar-speculative`: the AR pipeline confirms what a drafter at the router guessed, many tokens in one sweep.

Exact: every token is the one that the pipeline itself samples at its place, so the text is that of `ar`.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from functools import partial

from serving.modes import BOTH, DRAFTERS, HOSTS, LOOKUP
from serving.modes.ar import ArMode, check_tokens
from serving.modes.base import Generation
from serving.modes.drafters.local_model import LocalModel, LocalSequence, drafter_problem
from serving.modes.tokenizer import Tokenizers
from serving.router.accounting import Account
from serving.router.ring import RingView
from serving.router.session import Session
from stages.limits import MAX_DRAFT
from stages.model.draft_tree import (
    DEFAULT_BRANCHES,
    Draft,
    DraftLength,
    DraftPlan,
    SweepTime,
    TreeGrower,
    chosen,
)
from stages.model.speculation import MAX_DRAFT_TREE
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import invalid

# Bytes that must have been seen before to expect the same continuation, and most that are looked for.
MIN_MATCH, MAX_MATCH = 4, 24
# The same in tokens, each of which is several bytes.
MIN_TOKENS, MAX_TOKENS = 2, 8
# A match of so many bytes is trusted over a model.
SURE_MATCH = 8
# The same in tokens.
SURE_TOKENS = 3


class Drafter(ABC):
    """Guesses tokens for one request. Texts are in their encoding."""

    @abstractmethod
    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        """Guesses of what comes after `text`."""


class ModelDrafter(Drafter):
    """A model on the router's own machine, sampling with the request's own random numbers."""

    def __init__(self, sequence: LocalSequence, worth: DraftLength) -> None:
        self.model, self.worth = sequence.model, worth
        vocabulary = sequence.model.vocabulary
        drawn = (sequence.temperature, sequence.seed, sequence.shaping)
        self._grower = TreeGrower(sequence.text, vocabulary, worth, *drawn)

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        loop = asyncio.get_running_loop()
        growth = await loop.run_in_executor(self.model.compute, self._grower.grow, text, plan)
        return growth.draft(chosen(growth, plan, self.worth))


class LookupDrafter(Drafter):
    """Guesses what followed the last time that the text ended like this."""

    def __init__(self, worth: DraftLength, vocabulary: Vocabulary = BYTES, min_match: int | None = None) -> None:
        self.worth, self.vocabulary = worth, vocabulary
        least, self.most = (MIN_MATCH, MAX_MATCH) if vocabulary == BYTES else (MIN_TOKENS, MAX_TOKENS)
        self.least = min_match or least

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        found = self.vocabulary.tokens(self._found(text, min(plan.guesses or self.worth.length(), plan.most)))
        return Draft(tuple(found), tuple(range(len(found))), (self.worth.acceptance,) * len(found))

    def _found(self, text: bytes, count: int) -> bytes:
        known, cut = self.vocabulary.count(text), self.vocabulary.cut
        for length in range(min(self.most, known - 1), self.least - 1, -1):
            found = self._before(text, cut(text, known - length))
            if found >= 0:
                return cut(text, found + length, found + length + count)
        return b""

    def _before(self, text: bytes, ending: bytes) -> int:
        """Which token of `text` the last `ending` begins with that is not its end; -1 where there is none."""
        width = self.vocabulary.token_bytes
        found = text.rfind(ending, 0, len(text) - width)
        while found > 0 and found % width:  # halves of two neighbours may look like a token
            found = text.rfind(ending, 0, found + len(ending) - 1)
        return found // width


class BothDrafter(Drafter):
    """Lookup where a long match makes it sure, else the model."""

    def __init__(self, model: ModelDrafter) -> None:
        vocabulary = model.model.vocabulary
        sure = SURE_MATCH if vocabulary == BYTES else SURE_TOKENS
        self.lookup, self.model = LookupDrafter(model.worth, vocabulary, min_match=sure), model

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        found = await self.lookup.draft(text, plan)
        return found if found.tokens else await self.model.draft(text, plan)


# Drafting while a sweep is under way: the next guesses, as if all that were sent stood.

# That the guesses stand, and the token after them too: below it, others need the processor more.
LEAST_CHANCE = 0.2


# One run at a time: a second one in flight counts only if the first stands whole, at acceptance 0.8 and four guesses in
# a third of the cases, and hosts would compute three times what is used.
class AsyncDrafting:
    """Drafts of one request, made ahead. A draft is used if the sweep brings what it was drafted after."""

    def __init__(self, drafter: Drafter, worth: DraftLength, vocabulary: Vocabulary, account: Account) -> None:
        self.drafter, self.worth, self.vocabulary, self.account = drafter, worth, vocabulary, account
        self._task: asyncio.Task[Draft] | None = None
        self._plan = DraftPlan(0)
        self._after = list[int]()

    def begin(self, text: bytes, draft: Draft, plan: DraftPlan) -> None:
        """A sweep with `draft` after `text` is on its way: draft what follows, where that is likely to be used."""
        most = plan.most - draft.first
        pays = draft.chance * self.worth.acceptance >= LEAST_CHANCE
        if most < 2 or not pays or not 0 < draft.compute_ms < self.worth.sweeps.ms(len(draft.tokens)):
            return
        self._after = list(draft.tokens[: draft.first])
        guesses = None if plan.guesses is None else plan.guesses + 1
        self._plan = DraftPlan(most, guesses, plan.branches)
        self._task = asyncio.create_task(self.drafter.draft(text + self.vocabulary.encode(self._after), self._plan))

    async def take(self, written: list[int]) -> Draft | None:
        """The next draft, now that the sweep brought this; None where it has to be drafted yet."""
        if self._task is None:
            return None
        task, self._task = self._task, None
        right = written[:-1] == self._after
        if not right:
            self._plan.given_up.set()
        drafted = await task  # it has the thread that would draft anew
        rest = drafted.after(written[-1]) if right else None
        self.account.ahead_ms += drafted.compute_ms
        if rest is None:
            self.account.local_compute_ms += drafted.compute_ms
        else:
            self.account.ahead_used += 1
        return rest

    def close(self) -> None:
        """The request is over."""
        self._plan.given_up.set()
        if self._task is not None:
            self._task.cancel()


# The hosts draw at every guess with the numbers that `ar` would use there, and keep guesses that agree. Rejection
# sampling would accept the share 1 - TV (0.850 on 24 windows of validation text), this accepts 0.828, and the text is
# that of `ar`.
class SpeculativeMode(ArMode):
    """A sweep for each round of guesses; the router hears the result and guesses again."""

    name = "ar-speculative"

    def __init__(self, ring: RingView, drafter: LocalModel | None, tokenizers: Tokenizers) -> None:
        super().__init__(ring, tokenizers)
        self.local = drafter
        sweeps = SweepTime()
        self._worth = {name: DraftLength(sweeps) for name in DRAFTERS}

    async def generate(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        name = request.drafter or (HOSTS if self._hosts_draft else BOTH if self._is_roomy(request) else LOOKUP)
        account.drafter = name
        if name == HOSTS:
            async with aclosing(self._by_hosts(request, account)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        drafter, worth, vocabulary = self._drafter(name, request), self._worth[name], self.tokenizer.vocabulary
        capacity = self._reach(request) - 1  # the last token is never read back
        with Session(self.ring, "ar", capacity, request.due_at, account) as session:
            text, left = request.prompt, request.max_tokens
            with closing(AsyncDrafting(drafter, worth, vocabulary, account)) as ahead:
                draft = await drafter.draft(text, _plan(request, left)) if left > 1 else Draft()
                while True:
                    begin, drafted = time.perf_counter(), len(draft.tokens)
                    tree = stage_pb2.DraftTree(depths=draft.depths) if draft.is_tree else None
                    step = stage_pb2.Read(
                        prompt=request.given_tokens,
                        codec=request.codec,
                        sample=stage_pb2.Sample(sampling=request.sampling, draft=drafted, tree=tree),
                    )
                    # guesses need the result before, so a sweep ends at the router: H + 1 trips, where a byte costs H
                    await session.push(step, text, vocabulary.encode(draft.tokens))
                    ahead.begin(text, draft, _plan(request, left))
                    event = await session.event(
                        partial(check_tokens, request=request, vocabulary=vocabulary, most=drafted + 1)
                    )
                    worth.sweeps.learn(drafted, (time.perf_counter() - begin) * 1000)
                    written = vocabulary.tokens(event.text)
                    kept, right = draft.kept(written[:-1]), len(written) - 1
                    worth.learn(draft.first, kept, sum(draft.probs[: kept + 1]), draft.levels, draft.compute_ms)
                    account.add_draft(drafted, right, draft.compute_ms)
                    piece, ended = self._booked(event, request, account)
                    left -= right + 1
                    if ended := ended or not left:
                        await session.finish()
                    yield piece
                    if ended:
                        return
                    # accepted drafts are remembered on the first branch, and are read again from any other
                    session.keep(kept)
                    text, draft = text + piece, Draft()
                    if left > 1:
                        draft = await ahead.take(written) or await drafter.draft(text, _plan(request, left))

    @property
    def _hosts_draft(self) -> bool:
        return self._model is not None and self._model.drafts

    async def _by_hosts(self, request: Generation, account: Account) -> AsyncGenerator[bytes, None]:
        """The last host drafts, and begins each sweep itself: H trips, and only text comes here."""
        if not self._hosts_draft:
            raise invalid("drafter 'hosts' needs a model with a draft head, and the hosts' has none: choose another")
        vocabulary, left = self.tokenizer.vocabulary, request.max_tokens
        with Session(self.ring, "ar", self._reach(request) - 1, request.due_at, account) as session:
            drafting = stage_pb2.Drafting(most=request.draft or 0, branches=request.branches or 0)
            await session.push(
                stage_pb2.Read(
                    prompt=request.given_tokens,
                    codec=request.codec,
                    sample=stage_pb2.Sample(sampling=request.sampling, remaining=left, drafting=drafting),
                ),
                request.prompt,
            )
            while True:
                most = min(left, MAX_DRAFT_TREE + 1)
                event = await session.event(partial(check_tokens, request=request, vocabulary=vocabulary, most=most))
                right = vocabulary.count(event.text) - 1
                account.add_draft(max(event.drafted, right), right, 0.0)
                piece, ended = self._booked(event, request, account)
                left -= right + 1
                if ended := ended or not left:
                    await session.finish()
                yield piece
                if ended:
                    return

    def _booked(self, event: stage_pb2.Event, request: Generation, account: Account) -> tuple[bytes, bool]:
        """Book a sweep. Returns the part of its text that counts, and True where the output ends with it."""
        account.add_sweep(event)
        piece, ended = request.until_end(event.text, self.tokenizer.vocabulary)
        account.add_text(piece, event.logprobs)
        account.complete = event.complete
        return piece, ended or event.complete

    def _drafter(self, name: str, request: Generation) -> Drafter:
        worth = self._worth[name]
        if name == LOOKUP:
            return LookupDrafter(worth, self.tokenizer.vocabulary)
        if problem := drafter_problem(self.local, self.tokenizer):
            raise invalid(f"drafter {name!r} cannot be used, {problem}; drafter 'lookup' needs none")
        model, noun = self.local, self.tokenizer.noun
        assert model is not None
        if not self._is_roomy(request):
            raise invalid(f"the drafter's context is {model.positions} {noun}, {self._reach(request)} are needed")
        reach, temperature, seed = self._reach(request), request.temperature, request.seed
        sequence = LocalSequence(model, reach, temperature, seed, shaping=request.shaping)
        drafting = ModelDrafter(sequence, worth)
        return BothDrafter(drafting) if name == BOTH else drafting

    def _is_roomy(self, request: Generation) -> bool:
        """True if the router's model writes in the hosts' tokens, and has room for the whole text."""
        if self.local is None or drafter_problem(self.local, self.tokenizer):
            return False
        return self._reach(request) <= self.local.positions

    def _reach(self, request: Generation) -> int:
        """Tokens of the whole text."""
        return self.tokenizer.vocabulary.count(request.prompt) + request.max_tokens


def _plan(request: Generation, left: int) -> DraftPlan:
    """The guesses to make where `left` tokens are to be written yet: the last one needs no guess."""
    branches = request.branches or (1 if request.draft else DEFAULT_BRANCHES)
    return DraftPlan(min(left - 1, MAX_DRAFT), min(request.draft, left - 1) if request.draft else None, branches)
