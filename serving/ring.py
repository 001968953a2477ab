"""The router's side of the ring: a warm link to every host, over which the results of sessions come back."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from serving.accounting import Account
from serving.audit import Auditor
from serving.link import HostLink, Weights
from serving.paths import Path, Suspects, best_path
from serving.patience import Patience
from serving.routes import Route, call_round
from serving.session import Attempt, Session
from serving.topology import HostEntry
from serving.witness import Witness
from stages.alphabet import BYTES, Alphabet
from stages.meter import LinkMeter
from stages.pieces import MAX_PIECES
from stages.refusal import Refusal
from stages.relay import KEEP_WARM_S
from stages.security import LOOPBACK_ONLY, Security
from stages.sessions import KINDS, Kind
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)

RETRY_S = 0.2
DESCRIBE_S = 1.0
WATCH_S = 0.1
CLOSE_S = 1.0
"""Beyond the longest that an audit waits: what asks a host that is taken out is to hear its answer."""
WARM_BYTES = 16 << 10


@dataclass(frozen=True)
class RingSettings:
    """How a router uses its ring."""

    hop_timeout_s: float = 5.0
    """How long to wait for a host's receipt, or description, and for hosts that are lost to come back."""
    keep_warm_s: float = KEEP_WARM_S
    """Pause between messages that keep an idle link's congestion window open; 0 = none."""
    route: Route = "ring"
    audit_share: float = 0.0
    """Sweeps that are computed again by other hosts, of all."""
    pieces: int = MAX_PIECES
    """Hops that a long step is sent in at most; 1 only shows what pieces are worth."""


class Ring:
    """Links to every host, subscribed, warmed and kept warm, and the ways through them."""

    def __init__(
        self,
        hosts: Sequence[HostEntry],
        settings: RingSettings | None = None,
        witness: Witness | None = None,
        meter: Callable[[str], LinkMeter] | None = None,
        security: Security = LOOPBACK_ONLY,
        owner: str = "",
    ) -> None:
        """:param witness: what decides where hosts disagree.
        :param meter: who hears of the link to the host of a name.
        :param owner: what the router's certificate calls it: hosts let it listen under that name only."""
        self.settings = settings or RingSettings()
        self.name = ".".join([*([owner] if owner else []), secrets.token_hex(8)])
        self._security = security
        self.suspects, self.patience = Suspects(), Patience()
        self.auditor = Auditor(self, self.settings.audit_share, witness)
        self.links: list[HostLink] = []
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, tuple[Session, Attempt]] = {}
        self._sessions: set[Session] = set()
        self._rounds: dict[str, asyncio.Future[stage_pb2.Event]] = {}
        """Sweeps of audits under way."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._accused: dict[str, str] = {}
        """What audits found, by the host's name: one that comes back gets no work either."""
        self.changes = 0
        """Counts what may make another way the best, or none."""
        self._hosts, self._meter = tuple(hosts), meter

    async def open(self) -> None:
        """Start linking; returns at once. A RingView's `problem` says when the ring can be used."""
        self.set_hosts(self._hosts)

    def set_hosts(self, hosts: Sequence[HostEntry]) -> None:
        """Link to these hosts and no others; what is under way on one that goes away moves to others.

        Raises InputError where one may not be dialled: the ring stays as it was.
        """
        before = {link.entry: link for link in self.links}
        self.links = [before.pop(entry) if entry in before else self._link(entry) for entry in hosts]
        for entry, link in before.items():
            self._lose(link, "it was taken out")
            self._keepers.pop(entry.address).cancel()
            self.spawn(link.relay.close(self.settings.hop_timeout_s + CLOSE_S))
        for link in self.links:
            if link.entry.address not in self._keepers:
                self._keepers[link.entry.address] = _begun(self._keep_linked(link))

    async def close(self) -> None:
        tasks = [*self._tasks, *self._keepers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self.links:
            await link.relay.close()

    @property
    def ride_out_s(self) -> float:
        """How long a request waits for hosts that are lost."""
        return self.settings.hop_timeout_s

    @property
    def pieces(self) -> int:
        """Hops that a long step is sent in at most."""
        return self.settings.pieces

    def problem_of(self, weights: Weights | None) -> str:
        """Why no request can use the hosts that hold `weights`; None: those that hold any that are the same."""
        for link in self.links:
            if link.problem:
                return link.problem
        lacking = [link for link in self.links if weights is not None and weights not in link.held]
        if lacking:
            return f"host {lacking[0].entry.name} does not have the release that is served: it is being brought there"
        for index, kind in enumerate(KINDS):
            digests = {link.entry.name: next(reversed(link.held))[index] for link in self.links if link.held}
            if weights is None and len(set(digests.values())) > 1:
                shown = ", ".join(f"{name} {digest[:12] or '(none)'}" for name, digest in digests.items())
                return f"the hosts have different {kind} checkpoints ({shown}): give every host the same one"
        broken = [relay for link in self.links if link.info for relay in link.info.links if relay.problem]
        return broken[0].problem if broken else "there is no way through all blocks: check every host's --next"

    def choose(self, weights: Weights, avoid: Collection[str] = ()) -> Path | None:
        """The quickest way through hosts with `weights`; None where there is none."""
        return best_path(self.links, weights, self.suspects, avoid) if self.links else None

    @asynccontextmanager
    async def session(
        self,
        kind: Kind,
        weights: Weights,
        capacity: int,
        deadline_unix_ms: int,
        account: Account,
        alphabet: Alphabet = BYTES,
    ) -> AsyncIterator[Session]:
        """A session that is freed on every host at the end, however it ends."""
        session = Session(self, kind, weights, capacity, deadline_unix_ms, account, alphabet)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.remove(session)
            session.close()

    # What sessions need

    def begin(self, session: Session, attempt: Attempt) -> None:
        """Pass on to `session` what hosts say of `attempt`."""
        self._attempts[attempt.name] = (session, attempt)
        for link in attempt.path:
            link.sessions += 1

    def end(self, attempt: Attempt) -> None:
        """Free an attempt's sessions on its hosts."""
        del self._attempts[attempt.name]
        for link in attempt.path:
            link.sessions -= 1
            self.spawn(link.release(attempt.name))

    def send(self, session: Session, attempt: Attempt, hops: Sequence[stage_pb2.Hop]) -> None:
        """Put the hops of a sweep or step on their way; the session hears of its end."""
        first = attempt.path[0]

        def settled(refusal: Refusal | None) -> None:
            if refusal is not None:
                fault = stage_pb2.Fault(code=refusal.number, message=refusal.message, lost=first.entry.address)
                session.fault(attempt, fault)

        if self.settings.route == "ring":
            for hop in hops:
                first.relay.send(hop, settled)
        else:
            onward = self.settings.route == "nested"
            self.spawn(
                call_round(attempt.path, hops, onward, session.alphabet, lambda event: session.deliver(attempt, event))
            )

    async def push_round(self, path: Path, hops: Sequence[stage_pb2.Hop]) -> stage_pb2.Event:
        """Send one sweep round a path, as any other, in a session of its own. Raises Refusal."""
        name = secrets.token_hex(16)
        self._rounds[name] = result = asyncio.get_running_loop().create_future()
        try:
            for hop in hops:
                sent = stage_pb2.Hop()
                sent.CopyFrom(hop)
                sent.session, sent.place = name, 0
                sent.path[:] = [link.entry.address for link in path]
                await path[0].relay.push(sent)
            async with asyncio.timeout(self.settings.hop_timeout_s):
                event = await result
        except TimeoutError:
            raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "an audited sweep did not come back") from None
        finally:
            del self._rounds[name]
            for link in path:
                self.spawn(link.release(name))
        if event.WhichOneof("outcome") == "fault":
            raise Refusal.numbered(event.fault.code, event.fault.message)
        return event

    def accuse(self, link: HostLink, reason: str) -> None:
        """Give a host no work any more; requests that it worked for are told."""
        name = link.entry.name
        log.error("host %s lied: %s; it is taken out until the router restarts", name, reason)
        said = f"an audit found that {reason}; look at its machine and weights, then restart the router"
        self._accused[name] = said
        # it may have registered anew while the audit looked at it
        for each in {link, *(other for other in self.links if other.entry.name == name)}:
            each.accused = said
            for session in list(self._sessions):
                session.betray(each)
            self._lose(each, said)

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = _begun(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _link(self, entry: HostEntry) -> HostLink:
        link = HostLink(entry, self.name, self.settings.hop_timeout_s, self._security)
        link.accused = self._accused.get(entry.name, "")
        if self._meter is not None:
            link.relay.meter = self._meter(entry.name)
        return link

    async def _keep_linked(self, link: HostLink) -> None:
        """Subscribe to a host, for ever; a lost subscription fails what is under way there."""
        while True:
            keeper: asyncio.Task[None] | None = None
            try:
                async for events in link.events():
                    if keeper is None:
                        keeper = _begun(self._keep_fresh(link))
                    for event in events.events:
                        self._deliver(event)
                self._lose(link, "it closed the connection")
            except grpc.aio.AioRpcError as error:
                self._lose(link, link.relay.loss(error))
            finally:
                if keeper is not None:
                    keeper.cancel()
            await asyncio.sleep(RETRY_S)

    async def _keep_fresh(self, link: HostLink) -> None:
        """Keep a link warm and its description current. It gets traffic once it is warm."""
        pause_s = self.settings.keep_warm_s
        warmer: asyncio.Task[None] | None = None
        try:
            while True:
                before = link.problem
                try:
                    if pause_s and warmer is None:
                        await link.relay.warm(WARM_BYTES)
                        warmer = asyncio.create_task(link.relay.keep_warm(WARM_BYTES, pause_s))
                    await link.describe()
                    self.changes += 1
                    if link.problem != before:
                        log.info("%s", link.problem or f"host {link.entry.name} is ready")
                    self.spawn(link.release())
                except Refusal as refusal:
                    self._lose(link, refusal.message)
                await asyncio.sleep(DESCRIBE_S if not link.problem else RETRY_S)
        finally:
            if warmer is not None:
                warmer.cancel()

    async def watch(self) -> None:
        """Take hosts for lost that fell silent, for ever: one that is frozen, or behind a cut link, closes nothing."""
        before, pause_s = time.monotonic(), self.settings.keep_warm_s
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            stalled = now - before > 3 * WATCH_S  # then it was this process that heard nobody
            before = now
            for link in self.links:
                if not stalled and not link.problem and (silent_s := link.silent_s(pause_s)) is not None:
                    self._lose(link, f"it has been silent for {silent_s:.1f} s")

    def _deliver(self, event: stage_pb2.Event) -> None:
        waiting = self._rounds.get(event.session)
        if waiting is not None and not waiting.done():
            waiting.set_result(event)
        found = self._attempts.get(event.session)
        if found is not None:  # else the client has gone
            session, attempt = found
            session.deliver(attempt, event)

    def _lose(self, link: HostLink, reason: str) -> None:
        name = f"host {link.entry.name} at {link.entry.address}"
        # a reason that names the host already says what happened and what to do
        problem = reason if reason.startswith(name) else f"{name} is lost ({reason}); see that it runs"
        if not link.problem:
            log.warning("%s", problem)
        link.problem, self.changes = problem, self.changes + 1
        fault = stage_pb2.Fault(code=grpc.StatusCode.UNAVAILABLE.value[0], message=problem, lost=link.entry.address)
        for session, attempt in list(self._attempts.values()):
            if link in attempt.path:
                session.fault(attempt, fault)


def _begun(job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose failure is not passed over in silence."""
    task = asyncio.create_task(job)
    task.add_done_callback(_tell_failure)
    return task


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a job of the ring failed", exc_info=error)
