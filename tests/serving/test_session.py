"""Whom a session blames when a try fails: those go round next time."""

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


class Ring:
    """Remembers whom a session wants to go round; its hosts never answer."""

    name, problem, ride_out_s = "router", "", 5.0

    def __init__(self) -> None:
        self.suspects, self.patience = Suspects(), Patience()
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
