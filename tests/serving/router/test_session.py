"""Sessions: the hosts that a failed attempt suspects, and the time that results take."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from serving.router.accounting import Account
from serving.router.answer import AuditedAnswer
from serving.router.audit import Auditor
from serving.router.host_link import HostLink, HostPath
from serving.router.paths import HEDGE_SHARE, HEDGES, MIN_S, Hedging
from serving.router.ring import MAX_REPLAYS, Ring, RingView
from serving.router.session import Check, Session
from serving.router.settings import RingSettings
from serving.router.topology import HostEntry
from stages.host.schema_check import NOT_FOLLOWED
from stages.v1 import stage_pb2
from stages.wire.hop_stream import Relay, Settled
from stages.wire.messages import AnyWork, Work, work_of
from stages.wire.status import StatusError
from tests.conftest import eventually, refused
from tests.stages.hops import step

CODE = grpc.StatusCode


class Wire(Relay):
    """A link's connection that keeps what is sent, or answers it."""

    answer: Callable[[stage_pb2.Hop], StatusError | None] | None = None

    def send(self, hop: stage_pb2.Hop, settled: Settled) -> None:
        if self.answer is not None:
            settled(self.answer(hop))


class QuietLink(HostLink):
    """A host that is never dialled and calls itself by its blocks."""

    def __init__(self, name: str, blocks: tuple[int, ...]) -> None:
        super().__init__(HostEntry(name, f"127.0.0.1:{1000 + ord(name[0]) + int(name[-1])}", blocks, name), 1)
        self.relay = Wire(self.entry.address, 1, 1.0, name)
        self.info = stage_pb2.DescribeResponse(name=f"stage-{blocks[0]}")

    async def release(self, session: str | None = None) -> None: ...


class RecordingRing(Ring):
    """A ring of quiet hosts that remembers whom a session wants to avoid."""

    def __init__(self) -> None:
        super().__init__(RingSettings())
        self.path = (QuietLink("a-1", (0,)), QuietLink("b-1", (1,)))
        self.avoided: list[set[str]] = []

    def choose(self, weights: Any, avoid: Collection[str] = (), prefixes: Sequence[bytes] = ()) -> HostPath:
        names = {link.entry.address: link.entry.name for link in self.path}
        self.avoided.append({names[address] for address in avoid if address in names})
        return self.path


def opened(ring: RecordingRing) -> Session:
    return Session(RingView(ring, ("", "", "")), "ar", 20, time.monotonic() + 60.0, Account())


async def asking(ring: RecordingRing) -> Session:
    """A session that has sent a step."""
    session = opened(ring)
    await session.push(step(remaining=1), b"a")
    return session


@pytest.mark.parametrize(
    ("code", "host", "lost", "avoided"),
    [
        (CODE.UNAVAILABLE, "a-1", "b-1", {"b-1"}),
        (CODE.UNAVAILABLE, "", "a-1", {"a-1"}),
        (CODE.NOT_FOUND, "b-1", "", {"b-1"}),
        (CODE.INVALID_ARGUMENT, "a-1", "b-1", {"a-1", "b-1"}),
        (CODE.INTERNAL, "b-1", "", {"a-1", "b-1"}),
        (CODE.NOT_FOUND, "stage-1", "", {"b-1"}),
        (CODE.DEADLINE_EXCEEDED, "b-1", "", {"a-1", "b-1"}),
        (CODE.PERMISSION_DENIED, "", "a-1", {"a-1"}),
        (CODE.ABORTED, "b-1", "", {"a-1", "b-1"}),
    ],
)
async def test_a_fault_suspects_the_hosts_that_may_have_caused_it(
    code: grpc.StatusCode, host: str, lost: str, avoided: set[str]
) -> None:
    ring = RecordingRing()
    session = await asking(ring)
    address = next((link.entry.address for link in ring.path if link.entry.name == lost), "")
    session.tries.attempts[0].fail(stage_pb2.Fault(code=code.value[0], message="no", host=host, lost=address))
    waiting = asyncio.create_task(session.event())
    await eventually(lambda: len(ring.avoided) >= 2)
    waiting.cancel()
    assert ring.avoided == [set(), avoided]


async def test_a_grammar_without_a_next_token_fails_and_blames_no_host() -> None:
    ring = RecordingRing()
    session = opened(ring)
    held = stage_pb2.Sampling(grammar=stage_pb2.Grammar(json_schema="{}"))
    await session.push(step(remaining=1, sampling=held), b"a")
    fault = stage_pb2.Fault(code=CODE.INVALID_ARGUMENT.value[0], message=f"{NOT_FOLLOWED}: x", host="a-1")
    session.tries.attempts[0].fail(fault)
    with pytest.raises(StatusError, match=f"^{NOT_FOLLOWED}: x$") as caught:
        await session.event()
    assert (caught.value.code, ring.avoided, session.account.replays) == (CODE.INVALID_ARGUMENT, [set()], 0)


async def test_an_untried_path_is_tried_after_the_hop_timeout() -> None:
    """A lost hop may be noticed only after the hop timeout: the other path is still tried then."""
    ring = RecordingRing()
    ring.settings = replace(ring.settings, hop_timeout_s=0.0)
    session, lost = await asking(ring), stage_pb2.Fault(code=CODE.UNAVAILABLE.value[0], message="lost")
    session.tries.attempts[0].fail(lost)
    ring.path = (QuietLink("a-2", (0,)), QuietLink("b-2", (1,)))
    waiting = asyncio.create_task(session.event())
    while not (session.tries.attempts and session.tries.attempts[0].path is ring.path):
        await asyncio.sleep(0)
        assert not waiting.done(), waiting
    session.tries.attempts[0].fail(lost)
    with pytest.raises(StatusError, match="lost"):  # no way is left
        await waiting
    assert session.account.replays == 1


async def test_only_a_few_lost_requests_are_replayed_at_once() -> None:
    ring = RecordingRing()
    sessions = [await asking(ring) for _ in range(MAX_REPLAYS + 3)]
    for session in sessions:
        session.tries.attempts[0].fail(stage_pb2.Fault(code=CODE.UNAVAILABLE.value[0], message="lost"))
    waiting = [asyncio.create_task(session.event()) for session in sessions]
    done = 0
    while done < len(sessions):
        await asyncio.sleep(0)
        moved = [session.tries.attempts[0] for session in sessions if session.tries.attempts]
        assert sum(attempt.replays for attempt in moved) <= MAX_REPLAYS
        if len(moved) == min(done + MAX_REPLAYS, len(sessions)):
            attempt = next(attempt for attempt in moved if attempt.replays)
            attempt.receive(attempt, stage_pb2.Event(text=b"b"))
            done += 1
    assert [event.text for event in await asyncio.gather(*waiting)] == [b"b"] * len(sessions)


Answer = Callable[[stage_pb2.Hop, int], list[stage_pb2.Event]]


def tried(work: Work, answer: Answer, check: Check | None = None) -> tuple[stage_pb2.Event, list[list[AnyWork]], int]:
    """The result of `work`, what each try sent, and how often it was moved.

    :param answer: events for a hop of a try that has this number.
    """

    async def ask() -> tuple[stage_pb2.Event, list[list[AnyWork]], int]:
        tries, hosts = dict[str, list[AnyWork]](), RecordingRing()

        def answered(hop: stage_pb2.Hop) -> None:
            tries.setdefault(hop.session, []).append(work_of(hop))
            for event in answer(hop, len(tries) - 1):
                hosts._deliver(event)

        hosts.path[0].relay.answer = answered
        with opened(hosts) as session:
            drafts = len(work.clean) - getattr(work, "sample", stage_pb2.Sample()).draft
            await session.push(work, work.clean[:drafts], work.clean[drafts:])
            return await session.event(check), list(tries.values()), session.account.replays

    return asyncio.run(asyncio.wait_for(ask(), 30))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (CODE.INVALID_ARGUMENT, CODE.INVALID_ARGUMENT),
        (CODE.UNAUTHENTICATED, CODE.INTERNAL),
        (CODE.DEADLINE_EXCEEDED, CODE.INTERNAL),
    ],
)
def test_an_error_of_all_hosts_ends_the_request_with_their_words(code: grpc.StatusCode, shown: grpc.StatusCode) -> None:
    """An error that would look like a mistake of the client is a problem between router and hosts."""
    tries = set[str]()

    def answer(hop: stage_pb2.Hop, number: int) -> list[stage_pb2.Event]:
        tries.add(hop.session)
        fault = stage_pb2.Fault(code=code.value[0], message="a sentence", host="b-1")
        return [stage_pb2.Event(session=hop.session, fault=fault)]

    with refused(shown, "^b-1: a sentence$"):
        tried(step(clean=b"a", remaining=1), answer)
    assert len(tries) == 3


async def test_the_time_of_an_audit_is_not_booked_to_hosts() -> None:
    """The hosts' time is booked once, before the audit begins."""
    ring, took, booked = RecordingRing(), list[float](), list[int]()

    async def audit(answer: AuditedAnswer) -> bool:
        booked.append(len(took))
        return True

    ring.auditor = Auditor(ring, 1.0, None)
    ring.auditor.picks, ring.auditor.audit = lambda answer: True, audit  # type: ignore[method-assign]
    ring.hedging.record = lambda kind, took_s: took.append(took_s)  # type: ignore[method-assign]
    session = await asking(ring)
    session.tries.attempts[0].receive(session.tries.attempts[0], stage_pb2.Event(text=b"b"))
    await session.event()
    await session.finish()
    assert (booked, len(took)) == ([1], 1)


# The time-out of a result


async def test_a_slow_result_without_another_path_is_awaited() -> None:
    """No attempt is made or counted, however often the session checks."""
    ring = RecordingRing()
    ring.hedging.wait_s = lambda kind, left_s: 0.0  # type: ignore[method-assign]
    session = await asking(ring)
    waiting = asyncio.create_task(session.event())
    while len(ring.avoided) < 1100:  # pauses that grow with each try would be too long for a number
        await asyncio.sleep(0)
    session.tries.attempts[0].receive(session.tries.attempts[0], stage_pb2.Event(text=b"b"))
    await waiting
    assert [link.sessions for link in ring.path] == [1, 1]
    assert (len(session.tries.attempts), session.account.replays, session.tries.count) == (1, 0, 0)


def taught(times_s: list[float]) -> Hedging:
    patience = Hedging()
    for time_s in times_s:
        patience.record("ar", time_s)
    return patience


def test_a_hedge_waits_longer_than_results_take() -> None:
    assert taught([0.01] * 100).wait_s("ar", 60.0) == MIN_S
    assert 4.0 <= taught([4.0] * 100).wait_s("ar", 60.0) < 4.5
    uneven = taught([2.0, 4.0] * 100)
    assert uneven.wait_s("ar", 60.0) > 4.0


def test_hedges_are_limited_to_their_share() -> None:
    patience = Hedging()
    assert sum(patience.may_hedge() for _ in range(100)) == HEDGES
    for _ in range(int(2 / HEDGE_SHARE)):
        patience.record("ar", 0.1)
    assert sum(patience.may_hedge() for _ in range(100)) in (1, 2)


@pytest.mark.parametrize(("winner", "recorded"), [(0, ["ar"]), (1, [])])
async def test_a_slow_first_attempt_that_wins_is_recorded(winner: int, recorded: list[str]) -> None:
    """Else what always takes long would always be tried twice. When the second try wins, nothing is known."""
    ring, records = RecordingRing(), list[str]()
    ring.hedging.wait_s = lambda kind, left_s: 0.0  # type: ignore[method-assign]
    ring.hedging.record = lambda kind, took_s: records.append(kind)  # type: ignore[method-assign]
    session = await asking(ring)
    ring.path = (QuietLink("a-2", (0,)), QuietLink("b-2", (1,)))
    waiting = asyncio.create_task(session.event())
    await eventually(lambda: len(session.tries.attempts) == 2)
    session.tries.attempts[winner].receive(session.tries.attempts[winner], stage_pb2.Event(text=b"b"))
    await waiting
    assert records == recorded
