"""Whom a session blames when a try fails, and what it learns of how long work takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Any

import grpc
import pytest

from serving.accounting import Account
from serving.link import HostLink
from serving.paths import Suspects
from serving.patience import Patience
from serving.session import Attempt, Session
from serving.topology import HostEntry
from stages.refusal import Refusal
from stages.v1 import stage_pb2

CODE = grpc.StatusCode


def link(name: str, blocks: tuple[int, ...]) -> HostLink:
    """A host that calls itself by its blocks."""
    made = HostLink.__new__(HostLink)
    made.entry = HostEntry(name, f"{name}:1", blocks, name)
    made.info = stage_pb2.DescribeResponse(name=f"stage-{blocks[0]}")
    return made


class Auditor:
    takes_s: float | None = None

    def picks(self) -> bool:
        return self.takes_s is not None

    async def audit(self, *_: Any) -> bool:
        await asyncio.sleep(self.takes_s or 0.0)
        return True


class Ring:
    """Remembers whom a session wants to go round; its hosts never answer."""

    name, problem, ride_out_s, pieces = "router", "", 5.0, 16

    def __init__(self) -> None:
        self.suspects, self.patience, self.auditor = Suspects(), Patience(), Auditor()
        self.path = (link("a-1", (0,)), link("b-1", (1,)))
        self.avoided: list[set[str]] = []

    def choose(self, weights: Any, avoid: Collection[str] = ()) -> tuple[HostLink, ...]:
        self.avoided.append(set(avoid))
        return self.path

    def begin(self, session: Session, attempt: Attempt) -> None: ...

    def end(self, attempt: Attempt) -> None: ...

    def send(self, session: Session, attempt: Attempt, hops: Sequence[stage_pb2.Hop]) -> None: ...


@pytest.mark.parametrize(
    ("code", "host", "lost", "avoided"),
    [
        (CODE.UNAVAILABLE, "a-1", "b-1:1", {"b-1:1"}),
        (CODE.UNAVAILABLE, "", "a-1:1", {"a-1:1"}),
        (CODE.NOT_FOUND, "b-1", "", {"b-1:1"}),
        (CODE.INVALID_ARGUMENT, "a-1", "b-1:1", {"a-1:1", "b-1:1"}),
        (CODE.INTERNAL, "b-1", "", {"a-1:1", "b-1:1"}),
        (CODE.NOT_FOUND, "stage-1", "", {"b-1:1"}),
        (CODE.DEADLINE_EXCEEDED, "b-1", "", {"a-1:1", "b-1:1"}),
        (CODE.PERMISSION_DENIED, "", "a-1:1", {"a-1:1", "b-1:1"}),
        (CODE.ABORTED, "b-1", "", {"a-1:1", "b-1:1"}),
    ],
)
def test_nonsense_may_be_anybodys_and_silence_is_one_hosts(
    code: grpc.StatusCode, host: str, lost: str, avoided: set[str]
) -> None:
    async def fail_once() -> Ring:
        ring = Ring()
        session = opened(ring)
        await session.push(stage_pb2.Step(clean=b"a", remaining=1))
        session.fault(session.attempts[0], stage_pb2.Fault(code=code.value[0], message="no", host=host, lost=lost))
        waiting = asyncio.create_task(session.event())
        while len(ring.avoided) < 2:
            await asyncio.sleep(0)
        waiting.cancel()
        return ring

    ring = asyncio.run(asyncio.wait_for(fail_once(), 10))
    assert ring.avoided == [set(), avoided]


def opened(ring: Ring, deadline_s: float = 60.0, capacity: int = 8) -> Session:
    deadline_ms = int((time.time() + deadline_s) * 1000)
    return Session(ring, "ar", ("", "", ""), capacity, deadline_ms, Account())  # type: ignore[arg-type]


def ending(code: grpc.StatusCode, deadline_s: float = 60.0) -> tuple[Refusal, int]:
    """What a request ends in whose hosts all say so, and how often they were asked."""

    async def ask() -> tuple[Refusal, int]:
        ring = Ring()
        session = opened(ring, deadline_s)
        ring.send = lambda _, attempt, hops: session.fault(  # type: ignore[method-assign]
            attempt, stage_pb2.Fault(code=code.value[0], message="a sentence", host="b-1")
        )
        await session.push(stage_pb2.Step(clean=b"a", remaining=1))
        with pytest.raises(Refusal) as caught:
            await session.event()
        return caught.value, len(ring.avoided)

    return asyncio.run(asyncio.wait_for(ask(), 30))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (CODE.INVALID_ARGUMENT, CODE.INVALID_ARGUMENT),
        (CODE.UNAUTHENTICATED, CODE.INTERNAL),
        (CODE.DEADLINE_EXCEEDED, CODE.INTERNAL),
    ],
)
def test_what_all_hosts_say_ends_a_request_with_their_sentence(code: grpc.StatusCode, told: grpc.StatusCode) -> None:
    """What would look like a mistake of who asked is the router's trouble with its hosts."""
    refusal, tries = ending(code)
    assert (refusal.code, refusal.message, tries) == (told, "b-1: a sentence", 3)


def test_a_deadline_that_has_passed_ends_a_request_at_once() -> None:
    refusal, tries = ending(CODE.DEADLINE_EXCEEDED, 0.0)
    assert (refusal.code, tries) == (CODE.DEADLINE_EXCEEDED, 1)


def test_results_without_end_are_nonsense() -> None:
    async def flood() -> Ring:
        ring = Ring()
        session = opened(ring)
        await session.push(stage_pb2.Step(number=5, clean=b"a", remaining=1))
        for _ in range(10_000):  # each looks as if it came late
            session.deliver(session.attempts[0], stage_pb2.Event(number=0, text=b"b"))
        assert session._inbox.qsize() < 30
        waiting = asyncio.create_task(session.event())
        while len(ring.avoided) < 2:
            await asyncio.sleep(0)
        assert session.attempts[0].unread == 0
        waiting.cancel()
        return ring

    assert asyncio.run(asyncio.wait_for(flood(), 10)).avoided == [set(), {"a-1:1", "b-1:1"}]


def test_an_audits_time_is_not_the_hosts() -> None:
    async def ask() -> float:
        ring, took = Ring(), list[float]()
        ring.auditor.takes_s = 0.3
        ring.patience.learn = lambda kind, took_s: took.append(took_s)  # type: ignore[method-assign]
        session = opened(ring)
        await session.push(stage_pb2.Step(clean=b"a", remaining=1))
        begin = time.monotonic()
        session.deliver(session.attempts[0], stage_pb2.Event(text=b"b"))
        await session.event()
        return (time.monotonic() - begin) - took[0]

    assert asyncio.run(asyncio.wait_for(ask(), 10)) >= 0.3


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
        session = opened(ring)
        await session.push(stage_pb2.Step(clean=b"a", remaining=1))
        ring.path = (link("a-2", (0,)), link("b-2", (1,)))
        waiting = asyncio.create_task(session.event())
        while len(session.attempts) < 2:
            await asyncio.sleep(0)
        session.deliver(session.attempts[winner], stage_pb2.Event(text=b"b"))
        await waiting
        return patience

    assert asyncio.run(asyncio.wait_for(try_twice(), 10)).learnt == learnt
