"""Drafting while a sweep is under way: what is used, what is thrown away, and when nothing is begun."""

import asyncio

import pytest

from serving.modes.speculative import AsyncDrafting, Drafter
from serving.router.accounting import Account
from stages.model.draft_tree import Draft, DraftLength, DraftPlan, SweepTime
from stages.model.vocabulary import BYTES

SENT = Draft(tuple(b"abc"), (0, 1, 2), (0.99, 0.99, 0.99), 3, 5.0)
NEXT = Draft(tuple(b"defx"), (0, 1, 2, 0), (0.9,) * 4, 3, 7.0)


class Slow(Drafter):
    """Drafts NEXT once it may."""

    def __init__(self) -> None:
        self.asked, self.may = asyncio.Event(), asyncio.Event()
        self.texts, self.plans = list[bytes](), list[DraftPlan]()

    async def draft(self, text: bytes, plan: DraftPlan) -> Draft:
        self.texts.append(text)
        self.plans.append(plan)
        self.asked.set()
        await self.may.wait()
        return NEXT


def begun(sent: Draft = SENT, most: int = 20, guesses: int | None = None) -> tuple[Slow, AsyncDrafting, Account]:
    drafter, account = Slow(), Account()
    ahead = AsyncDrafting(drafter, DraftLength(SweepTime()), BYTES, account)
    ahead.begin(b"known ", sent, DraftPlan(most, guesses))
    return drafter, ahead, account


async def test_it_is_drafted_before_the_sweep_is_back() -> None:
    drafter, ahead, account = begun(SENT, 20, 3)
    await drafter.asked.wait()  # nothing came back yet
    assert drafter.texts == [b"known abc"]
    assert (drafter.plans[0].most, drafter.plans[0].guesses) == (17, 4), "the token after them is guessed, too"
    drafter.may.set()
    assert await ahead.take(list(b"abcd")) == Draft(tuple(b"ef"), (0, 1), (0.9, 0.9), 3, 7.0)
    assert (account.ahead_ms, account.ahead_used, account.local_compute_ms) == (7.0, 1, 0.0), "a draft is booked later"
    assert await ahead.take(list(b"abcd")) is None, "it is used once"


@pytest.mark.parametrize("written", [b"abx", b"x", b"abcq", b"abcx"])
async def test_it_is_thrown_away_where_something_else_was_written(written: bytes) -> None:
    drafter, ahead, account = begun()
    await drafter.asked.wait()
    taking = asyncio.create_task(ahead.take(list(written)))
    await asyncio.sleep(0)
    assert drafter.plans[0].given_up.is_set() is (written[:3] != b"abc"), "nobody waits for all of it"
    drafter.may.set()
    assert await taking is None
    assert (account.ahead_ms, account.ahead_used, account.local_compute_ms) == (7.0, 0, 7.0)


@pytest.mark.parametrize(
    ("draft", "most"),
    [
        (Draft(tuple(b"abc"), (0, 1, 2), (0.5, 0.5, 0.5), 3, 5.0), 20),  # unlikely to stand
        (Draft(tuple(b"abc"), (0, 1, 2), (0.99, 0.99, 0.99), 0, 0.0), 20),  # drafting takes no time
        (Draft(tuple(b"abc"), (0, 1, 2), (0.99, 0.99, 0.99), 3, 5000.0), 20),  # or more than a sweep
        (SENT, 4),  # the text is over then
    ],
)
async def test_nothing_is_drafted_where_it_does_not_pay(draft: Draft, most: int) -> None:
    drafter, ahead, _ = begun(draft, most)
    await asyncio.sleep(0)
    assert await ahead.take(list(b"abcd")) is None
    assert not drafter.texts


async def test_a_request_that_ends_leaves_nothing_running() -> None:
    drafter, ahead, _ = begun()
    await drafter.asked.wait()
    ahead.close()
    await asyncio.sleep(0)
    assert drafter.plans[0].given_up.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}
