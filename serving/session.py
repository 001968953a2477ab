"""One request's place on the hosts: work goes out, results come back, and what fails is done again elsewhere.

Hosts that die, freeze, are cut off or answer nonsense cost a request time, never its text: the journal says what was
read, and any other hosts with the same blocks go on from there to the same bytes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from serving import ticket
from serving.accounting import Account
from serving.audit import Auditor
from serving.journal import Journal, Work, start_of
from serving.link import HostLink, Weights
from serving.paths import Path, Suspects
from serving.patience import Patience
from stages.admission import check_passages
from stages.alphabet import BYTES, Alphabet
from stages.pieces import hops_of
from stages.refusal import Refusal
from stages.sessions import KINDS, Kind
from stages.v1 import stage_pb2

Check = Callable[[stage_pb2.Event], object]
"""Raises Refusal for a result that cannot be one."""

_Code = grpc.StatusCode
ELSEWHERE = {_Code.UNAVAILABLE, _Code.NOT_FOUND, _Code.FAILED_PRECONDITION, _Code.CANCELLED, _Code.RESOURCE_EXHAUSTED}
"""Faults of a host's state: other hosts may do the work, or the same one in a moment. All others are nonsense, which a
sound host does not say: the router checked the request, and keeps its deadline."""
OF_THE_ROUTER = {_Code.UNAUTHENTICATED, _Code.PERMISSION_DENIED, _Code.DEADLINE_EXCEEDED}
"""Faults that a client would take for its own."""
NONSENSE_TRIES = 3
MOST_EVENTS_BEYOND = 8
"""Beyond one for each position of a session: nobody sound sends as many that are not waited for."""
PAUSE_S = 0.05
MOST_PAUSE_S = 0.5


class Betrayed(Exception):
    """A host that had a part in this request lied: all of it must be written again."""


@dataclass(eq=False)
class Attempt:
    """A try of a session's work: hosts, and what these call the session."""

    path: Path
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    unread: int = 0
    """Events that came of it, and were not looked at yet."""


class Carrier(Protocol):
    """What a session needs of the ring."""

    name: str
    suspects: Suspects
    auditor: Auditor
    patience: Patience

    def problem_of(self, weights: Weights) -> str: ...

    @property
    def ride_out_s(self) -> float: ...

    def choose(self, weights: Weights, avoid: Collection[str] = ()) -> Path | None: ...

    def begin(self, session: Session, attempt: Attempt) -> None: ...

    def end(self, attempt: Attempt) -> None: ...

    @property
    def pieces(self) -> int: ...

    def send(self, session: Session, attempt: Attempt, hops: Sequence[stage_pb2.Hop]) -> None: ...


class Session:
    """Use it through `Ring.session`."""

    def __init__(
        self,
        ring: Carrier,
        kind: Kind,
        weights: Weights,
        capacity: int,
        deadline_unix_ms: int,
        account: Account,
        alphabet: Alphabet = BYTES,
    ) -> None:
        """:param weights: that every try must use: a text comes from one set.
        :param alphabet: that the model reads."""
        self.ring, self.kind, self.weights, self.capacity = ring, kind, weights, capacity
        self.alphabet = alphabet
        self.deadline_unix_ms, self.account = deadline_unix_ms, account
        self.attempts: list[Attempt] = []
        self._digest = weights[KINDS.index(kind)]
        self._journal = Journal(alphabet)
        self._work: Work | None = None
        self._written = b""
        """Symbols that the hosts went on from by themselves since `_work` was pushed."""
        self._inbox: asyncio.Queue[tuple[Attempt, stage_pb2.Event]] = asyncio.Queue()
        self._blamed: set[str] = set()
        """Addresses of hosts that failed this session."""
        self._failed_at: float | None = None
        """Since when the work under way fails."""
        self._tries = 0
        self._waiting_since = 0.0
        self._helpers = set[HostLink]()
        """Hosts that had a part in what was delivered."""
        self._betrayed = ""

    async def push(self, work: Work) -> None:
        """Start a sweep, or the first of some AR steps. Raises Refusal where there are no hosts for it."""
        self._go_on(work)
        if self.attempts:
            self._send(self.attempts[0], work)
        else:
            await self._try()

    async def event(self, check: Check | None = None) -> stage_pb2.Event:
        """The next result. Raises Refusal when no hosts get it done, or at the deadline."""
        while True:
            found = await self._next()
            if found is None:
                self._hedge()
                continue
            attempt, event = found
            attempt.unread -= 1
            assert self._work is not None
            if attempt not in self.attempts:
                continue  # it was given up, or another was faster
            if event.WhichOneof("outcome") == "fault":
                await self._fail(attempt, event.fault)
                continue
            due = self._work.number + self.alphabet.count(self._written)
            if event.number < due:
                continue  # of a hop that was sent twice
            try:
                if event.number > due:
                    raise Refusal(_Code.INTERNAL, f"the result of {event.number} came for {due}")
                check_passages(event.passages)
                if check is not None:
                    check(event)
            except Refusal as refusal:
                last = attempt.path[-1].entry
                fault = stage_pb2.Fault(code=refusal.number, message=refusal.message, host=last.name)
                await self._fail(attempt, fault)
                continue
            took_s = time.monotonic() - self._waiting_since
            if self.ring.auditor.picks():
                await self._audit(attempt, event)
            if self._betrayed:
                raise Betrayed(self._betrayed)
            self._settle(attempt, event, took_s)
            ticket.arrived()
            return event

    def betray(self, link: HostLink) -> None:
        """Hear that a host lied."""
        if link in self._helpers:
            self._betrayed = f"host {link.entry.name} lied"

    def fault(self, attempt: Attempt, fault: stage_pb2.Fault) -> None:
        """Hear that an attempt ended."""
        self.deliver(attempt, stage_pb2.Event(session=attempt.name, fault=fault))

    def deliver(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        """Hear what came of an attempt; one whose hosts send without end has failed."""
        most = self.capacity + MOST_EVENTS_BEYOND
        if attempt.unread > most:
            return
        if attempt.unread == most:
            fault = stage_pb2.Fault(code=_Code.INTERNAL.value[0], message="the hosts sent results without end")
            event = stage_pb2.Event(session=attempt.name, fault=fault)
        attempt.unread += 1
        self._inbox.put_nowait((attempt, event))

    def close(self) -> None:
        for attempt in list(self.attempts):
            self._give_up(attempt)

    def _go_on(self, work: Work) -> None:
        """Make `work` the work under way, after what came before."""
        if self._work is not None:
            self._journal.add(self._work, start_of(work))
        self._work, self._written = work, b""
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        self._failed_at, self._tries = None, 0
        self._waiting_since = time.monotonic()

    def _settle(self, attempt: Attempt, event: stage_pb2.Event, took_s: float) -> None:
        """A result is here: whoever else was at it can stop."""
        # also where there was a second try: else what takes long would be tried twice for ever
        if self._failed_at is None and attempt is self.attempts[0]:
            self.ring.patience.learn(self._pace, took_s)
        for other in [other for other in self.attempts if other is not attempt]:
            self._give_up(other)
        self._helpers.update(attempt.path)
        hosts = {link.info.name: link for link in attempt.path if link.info}
        self.account.hosts = {name: link.entry for name, link in hosts.items()}
        for passage in event.passages:
            if passage.host in hosts:
                hosts[passage.host].learn(passage)
        assert self._work is not None
        if isinstance(self._work, stage_pb2.Step) and self._work.remaining > 1:
            self._written += event.text
            self._begin_waiting()

    async def _next(self) -> tuple[Attempt, stage_pb2.Event] | None:
        """What came; None when it is time for a second try."""
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        left_s = self.deadline_unix_ms / 1000 - time.time()
        waited_s = time.monotonic() - self._waiting_since
        patient = len(self.attempts) > 1 or self._tries > 0
        wait_s = left_s if patient else min(self.ring.patience.wait_s(self._pace, left_s) - waited_s, left_s)
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                return await self._inbox.get()
        except TimeoutError:
            if time.time() * 1000 < self.deadline_unix_ms:
                return None
            message = "the deadline passed before the hosts sent a result"
            raise Refusal(_Code.DEADLINE_EXCEEDED, message) from None

    def _hedge(self) -> None:
        """Overtake a slow try by a second one, on other hosts where that can be."""
        self._tries += 1
        current = {link.entry.address for attempt in self.attempts for link in attempt.path}
        path = self.ring.choose(self.weights, self._blamed | current)
        if path and not any(path == attempt.path for attempt in self.attempts) and self.ring.patience.may_hedge():
            self._begin(path)

    async def _fail(self, attempt: Attempt, fault: stage_pb2.Fault) -> None:
        """End an attempt; if it was the last one, begin another. Raises Refusal where that is no use."""
        self._give_up(attempt)
        self._blame(attempt, fault)
        if self.attempts:
            return
        source = f"{fault.host}: " if fault.host else ""
        refusal = Refusal.numbered(fault.code, source + fault.message)
        is_over = time.time() * 1000 >= self.deadline_unix_ms - ticket.JITTER_MS
        late = is_over and refusal.code is _Code.DEADLINE_EXCEEDED
        if refusal.code in OF_THE_ROUTER and not late:
            refusal = Refusal(_Code.INTERNAL, refusal.message)
        self._tries += 1
        self._failed_at = self._failed_at or time.monotonic()
        patience_s = self.ring.ride_out_s - (time.monotonic() - self._failed_at)
        nonsense = refusal.code not in ELSEWHERE
        if late or patience_s <= 0 or (nonsense and self._tries >= NONSENSE_TRIES):
            raise refusal
        if refusal.code is _Code.RESOURCE_EXHAUSTED and not self._other_path(attempt):
            raise refusal
        if self._tries > 1:
            await asyncio.sleep(min(PAUSE_S * 2**self._tries, MOST_PAUSE_S))
        await self._try(refusal)

    async def _try(self, because: Refusal | None = None) -> None:
        """Begin an attempt, once there are hosts for it. Raises Refusal when there are none for too long."""
        left_s = self.deadline_unix_ms / 1000 - time.time()
        patience_s = min(self.ring.ride_out_s, left_s)
        deadline = time.monotonic() + patience_s
        while (path := self.ring.choose(self.weights, self._blamed)) is None:
            if time.monotonic() > deadline:
                problem = because.message if because else self.ring.problem_of(self.weights)
                raise Refusal(_Code.UNAVAILABLE, f"{problem} (waited {patience_s:.1f} s)")
            await asyncio.sleep(PAUSE_S)
        self._begin(path)

    def _begin(self, path: Path) -> None:
        attempt = Attempt(path)
        if self._tries:
            self.account.replays += 1
        self.attempts.append(attempt)
        self.ring.begin(self, attempt)
        self._catch_up()
        assert self._work is not None
        self._send(attempt, self._journal.replay(self._work))

    def _catch_up(self) -> None:
        """Make the step that the hosts are at by themselves the work under way."""
        if self._written:
            assert isinstance(self._work, stage_pb2.Step)
            self._work, self._written = self._journal.advance(self._work, self._written), b""

    def _send(self, attempt: Attempt, work: Work) -> None:
        hop = self._hop(attempt, work)
        ticket.stamp(hop)
        self.ring.send(self, attempt, hops_of(hop, self.alphabet, self.ring.pieces))

    def _hop(self, attempt: Attempt, work: Work) -> stage_pb2.Hop:
        hop = stage_pb2.Hop(
            router=self.ring.name,
            session=attempt.name,
            deadline_unix_ms=self.deadline_unix_ms,
            digest=self._digest,
            capacity=self.capacity,
            path=[link.entry.address for link in attempt.path],
        )
        if isinstance(work, stage_pb2.Sweep):
            hop.sweep.CopyFrom(work)
        else:
            hop.step.CopyFrom(work)
        return hop

    async def _audit(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        self._catch_up()
        assert self._work is not None
        opening = self._hop(attempt, self._journal.replay(self._work))
        if opening.WhichOneof("work") == "step":
            opening.step.remaining = 1
        self._helpers.update(attempt.path)
        hops = hops_of(opening, self.alphabet)
        if not await self.ring.auditor.audit(attempt.path, self.weights, hops, event, self.alphabet):
            self._betrayed = self._betrayed or "a sweep was wrong"

    def _give_up(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        self.ring.end(attempt)

    def _blame(self, attempt: Attempt, fault: stage_pb2.Fault) -> None:
        """Remember who failed: the host that did not take the work, else the one that said so. Nonsense is noticed by
        whoever gets it, so it may be anybody's on the way there."""
        names = [(link.entry.name, link) for link in attempt.path]
        names += [(link.info.name, link) for link in attempt.path if link.info]  # what it calls itself
        source = next((link.entry.address for name, link in names if name == fault.host), "")
        guilty = fault.lost or source
        if fault.lost and source:
            self.ring.suspects.add(source, fault.lost)
        if Refusal.numbered(fault.code, fault.message).code not in ELSEWHERE:
            self._blamed.update(link.entry.address for link in attempt.path)
        elif guilty:
            self._blamed.add(guilty)

    def _other_path(self, attempt: Attempt) -> bool:
        path = self.ring.choose(self.weights, self._blamed)
        return path is not None and path != attempt.path

    @property
    def _pace(self) -> str:
        """What kind of work it is, for the time that it takes."""
        if isinstance(self._work, stage_pb2.Step) and self._work.candidates:
            return f"{self.kind} candidates"
        return self.kind
