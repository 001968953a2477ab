"""Whom a session blames when a try fails, and what it learns of how long work takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import grpc
import pytest

from serving.accounting import Account
from serving.link import HostLink
from serving.paths import Suspects
from serving.patience import Patience
from serving.session import Attempt, Session
from serving.topology import HostEntry
from stages.v1 import stage_pb2

CODE = grpc.StatusCode


def link(name: str, blocks: tuple[int, ...]) -> HostLink:
    made = HostLink.__new__(HostLink)
    made.entry, made.info = HostEntry(name, f"{name}:1", blocks, name), stage_pb2.DescribeResponse(name=name)
    return made


class Auditor:
    def picks(self) -> bool:
        return False


class Ring:
    """Remembers whom a session wants to go round; its hosts never answer."""

    name, problem, ride_out_s = "router", "", 5.0

    def __init__(self) -> None:
        self.suspects, self.patience, self.auditor = Suspects(), Patience(), Auditor()
        self.path = (link("a-1", (0,)), link("b-1", (1,)))
        self.avoided: list[set[str]] = []

    def choose(self, weights: Any, avoid: Collection[str] = ()) -> tuple[HostLink, ...]:
        self.avoided.append(set(avoid))
        return self.path

    def begin(self, session: Session, attempt: Attempt) -> None: ...

    def end(self, attempt: Attempt) -> None: ...

    def send(self, session: Session, attempt: Attempt, hop: stage_pb2.Hop) -> None: ...


@pytest.mark.parametrize(
    ("code", "host", "lost", "avoided"),
    [
        (CODE.UNAVAILABLE, "a-1", "b-1:1", {"b-1:1"}),
        (CODE.UNAVAILABLE, "", "a-1:1", {"a-1:1"}),
        (CODE.NOT_FOUND, "b-1", "", {"b-1:1"}),
        (CODE.INVALID_ARGUMENT, "a-1", "b-1:1", {"a-1:1", "b-1:1"}),
        (CODE.INTERNAL, "b-1", "", {"a-1:1", "b-1:1"}),
    ],
)
def test_nonsense_may_be_anybodys_and_silence_is_one_hosts(
    code: grpc.StatusCode, host: str, lost: str, avoided: set[str]
) -> None:
    async def fail_once() -> Ring:
        ring = Ring()
        deadline_ms = int(time.time() * 1000) + 60_000
        session = Session(ring, "ar", ("", "", ""), 8, deadline_ms, Account())  # type: ignore[arg-type]
        await session.push(stage_pb2.Step(clean=b"a", remaining=1))
        session.fault(session.attempts[0], stage_pb2.Fault(code=code.value[0], message="no", host=host, lost=lost))
        waiting = asyncio.create_task(session.event())
        while len(ring.avoided) < 2:
            await asyncio.sleep(0)
        waiting.cancel()
        return ring

    ring = asyncio.run(asyncio.wait_for(fail_once(), 10))
    assert ring.avoided == [set(), avoided]


class Impatient(Patience):
    """Makes a second try at once, and remembers what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt: list[str] = []

    def wait_s(self, kind: str, left_s: float) -> float:
        return 0.0

    def learn(self, kind: str, took_s: float) -> None:
        self.learnt.append(kind)


@pytest.mark.parametrize(("winner", "learnt"), [(0, ["ar"]), (1, [])])
def test_a_first_try_that_was_slow_teaches_patience(winner: int, learnt: list[str]) -> None:
    """Else what always takes long would always be tried twice. When the second try wins, nothing is known."""

    async def try_twice() -> Impatient:
        ring = Ring()
        ring.patience = patience = Impatient()
        deadline_ms = int(time.time() * 1000) + 60_000
        session = Session(ring, "ar", ("", "", ""), 8, deadline_ms, Account())  # type: ignore[arg-type]
        await session.push(stage_pb2.Step(clean=b"a", remaining=1))
        ring.path = (link("a-2", (0,)), link("b-2", (1,)))
        waiting = asyncio.create_task(session.event())
        while len(session.attempts) < 2:
            await asyncio.sleep(0)
        session.deliver(session.attempts[winner], stage_pb2.Event(text=b"b"))
        await waiting
        return patience

    assert asyncio.run(asyncio.wait_for(try_twice(), 10)).learnt == learnt
