"""A trial under load, and beside liars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from serving.session import Betrayed
from serving.trial import BUSY_TRIES, _when_free
from stages.refusal import Refusal, exhausted


def trial(*answers: Exception | int) -> Callable[[], int]:
    left = list(answers)

    async def job() -> int:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return lambda: asyncio.run(_when_free(job))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.trial.BUSY_PAUSE_S", 0.0)


def test_it_waits_for_busy_hosts_and_goes_round_liars() -> None:
    assert trial(exhausted("full", 10), Betrayed("host b lied"), 3)() == 3


def test_it_does_not_try_for_ever() -> None:
    with pytest.raises(Refusal, match="host b lied in the trial: look at the hosts") as caught:
        trial(*[Betrayed("host b lied")] * BUSY_TRIES)()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
