"""Guessing what the AR pipeline will write next, so that one sweep can confirm several symbols."""

import asyncio
from abc import ABC, abstractmethod

from onesweep.serving.modes.drafters.base import LocalSequence
from onesweep.serving.router.accounting import Account
from onesweep.stages.model.draft_tree import Draft, DraftLength, DraftPlan, TreeGrower, chosen
from onesweep.stages.model.vocabulary import BYTES, Alphabet

# Bytes that must have been seen before to expect the same continuation, and most that are looked for.
MIN_MATCH, MAX_MATCH = 4, 24
# The same in tokens, each of which is several bytes.
MIN_TOKENS, MAX_TOKENS = 2, 8
# A match of so many bytes is trusted over a model.
SURE_MATCH = 8
# The same in tokens.
SURE_TOKENS = 3


class Drafter(ABC):
    """Guesses symbols for one request. Texts are in their encoding."""

    @abstractmethod
    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        """Guesses of what comes after `text`."""


class ModelDrafter(Drafter):
    """A model on the router's own machine, sampling with the request's own random numbers."""

    def __init__(self, sequence: LocalSequence, worth: DraftLength) -> None:
        self.model, self.worth = sequence.model, worth
        alphabet = sequence.model.alphabet
        self._grower = TreeGrower(sequence.text, alphabet, worth, sequence.temperature, sequence.seed, sequence.shaping)

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        loop = asyncio.get_running_loop()
        growth = await loop.run_in_executor(self.model.compute, self._grower.grow, text, plan)
        return growth.draft(chosen(growth, plan, self.worth))


class LookupDrafter(Drafter):
    """Guesses what followed the last time that the text ended like this."""

    def __init__(self, worth: DraftLength, alphabet: Alphabet = BYTES, min_match: int | None = None) -> None:
        self.worth, self.alphabet = worth, alphabet
        least, self.most = (MIN_MATCH, MAX_MATCH) if alphabet == BYTES else (MIN_TOKENS, MAX_TOKENS)
        self.least = min_match or least

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        found = self.alphabet.symbols(self._found(text, min(plan.guesses or self.worth.length(), plan.most)))
        return Draft(tuple(found), tuple(range(len(found))), (self.worth.acceptance,) * len(found))

    def _found(self, text: bytes, count: int) -> bytes:
        known, cut = self.alphabet.count(text), self.alphabet.cut
        for length in range(min(self.most, known - 1), self.least - 1, -1):
            found = self._before(text, cut(text, known - length))
            if found >= 0:
                return cut(text, found + length, found + length + count)
        return b""

    def _before(self, text: bytes, ending: bytes) -> int:
        """Which symbol of `text` the last `ending` begins with that is not its end; -1 where there is none."""
        width = self.alphabet.symbol_bytes
        found = text.rfind(ending, 0, len(text) - width)
        while found > 0 and found % width:  # halves of two neighbours may look like a symbol
            found = text.rfind(ending, 0, found + len(ending) - 1)
        return found // width


class BothDrafter(Drafter):
    """Lookup where a long match makes it sure, else the model."""

    def __init__(self, model: ModelDrafter) -> None:
        alphabet = model.model.alphabet
        sure = SURE_MATCH if alphabet == BYTES else SURE_TOKENS
        self.lookup, self.model = LookupDrafter(model.worth, alphabet, min_match=sure), model

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        found = await self.lookup.draft(text, plan)
        return found if found.symbols else await self.model.draft(text, plan)


# Drafting while a sweep is under way: the next guesses, as if all that were sent stood.

# That the guesses stand, and the symbol after them too: below it, others need the processor more.
LEAST_CHANCE = 0.2


# One run at a time: a second one in flight counts only if the first stands whole, at acceptance 0.8 and four guesses in
# a third of the cases, and hosts would compute three times what is used.
class AsyncDrafting:
    """Drafts of one request, made ahead. A draft is used if the sweep brings what it was drafted after."""

    def __init__(self, drafter: Drafter, worth: DraftLength, alphabet: Alphabet, account: Account) -> None:
        self.drafter, self.worth, self.alphabet, self.account = drafter, worth, alphabet, account
        self._task: asyncio.Task[Draft] | None = None
        self._plan = DraftPlan(0)
        self._after = list[int]()

    def begin(self, text: bytes, draft: Draft, plan: DraftPlan) -> None:
        """A sweep with `draft` after `text` is on its way: draft what follows, where that is likely to be used."""
        most = plan.most - draft.first
        pays = draft.chance * self.worth.acceptance >= LEAST_CHANCE
        if most < 2 or not pays or not 0 < draft.compute_ms < self.worth.sweeps.ms(len(draft.symbols)):
            return
        self._after = list(draft.symbols[: draft.first])
        guesses = None if plan.guesses is None else plan.guesses + 1
        self._plan = DraftPlan(most, guesses, plan.branches)
        self._task = asyncio.create_task(self.drafter.draft(text + self.alphabet.encode(self._after), self._plan))

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
