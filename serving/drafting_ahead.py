"""Drafting while a sweep is under way: the next guesses, as if all that were sent stood."""

from __future__ import annotations

import asyncio

from serving.accounting import Account
from serving.drafting import Draft, Drafter
from serving.guess_growth import Plan
from serving.worth import DraftWorth
from stages.alphabet import Alphabet

LEAST_CHANCE = 0.2
"""That the guesses stand, and the symbol after them too: below it, others need the processor more."""


class DraftsAhead:
    """Of one request. What was drafted ahead is used if the sweep brings what it was drafted after."""

    def __init__(self, drafter: Drafter, worth: DraftWorth, alphabet: Alphabet, account: Account) -> None:
        self.drafter, self.worth, self.alphabet, self.account = drafter, worth, alphabet, account
        self._task: asyncio.Task[Draft] | None = None
        self._plan = Plan(0)
        self._after = list[int]()

    def begin(self, text: bytes, draft: Draft, plan: Plan) -> None:
        """A sweep with `draft` after `text` is on its way: draft what follows, where that is likely to be used."""
        most = plan.most - draft.first
        pays = draft.chance * self.worth.acceptance >= LEAST_CHANCE
        if most < 2 or not pays or not 0 < draft.compute_ms < self.worth.sweeps.ms(len(draft.symbols)):
            return
        self._after = list(draft.symbols[: draft.first])
        guesses = None if plan.guesses is None else plan.guesses + 1
        self._plan = Plan(most, guesses, plan.branches)
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
