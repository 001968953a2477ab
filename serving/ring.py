"""The router's side of the ring: a warm link to every host, and sessions whose results come back over them.

Two other routes are there to be measured against: `nested`, where every host waits for the next one's answer and
hands it back, and `router`, where every hop starts and ends at the router.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import grpc
import grpc.aio

from serving.topology import HostEntry, Topology
from stages.errors import InputError
from stages.hop import next_step
from stages.refusal import Refusal
from stages.relay import KEEP_WARM_S, Relay
from stages.security import LOOPBACK_ONLY, Security
from stages.sessions import KINDS, Kind
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)

RETRY_S = 0.2
RELEASE_TIMEOUT_S = 5.0
RELEASE_AFTER_S = 0.005
"""Pause before sessions are freed: the answer goes out first."""
MESSAGE_BYTES = 64 << 20
WARM_BYTES = 16 << 10

Route = Literal["ring", "nested", "router"]
ROUTES: tuple[Route, ...] = get_args(Route)


def check_route(text: str) -> Route:
    """`text` as a route. Raises InputError."""
    for route in ROUTES:
        if text == route:
            return route
    raise InputError(f"unknown route {text!r}; choose from {', '.join(ROUTES)}")


@dataclass(frozen=True)
class RingSettings:
    """How a router uses its ring."""

    hop_timeout_s: float = 5.0
    """How long to wait for a host's receipt, or description."""
    keep_warm_s: float = KEEP_WARM_S
    """Pause between messages that keep an idle link's congestion window open; 0 = none."""
    route: Route = "ring"


class HostLink:
    """One host as the router sees it."""

    def __init__(self, entry: HostEntry, router: str, hop_timeout_s: float, security: Security = LOOPBACK_ONLY) -> None:
        self.entry, self.router = entry, router
        self.relay = Relay(entry.address, MESSAGE_BYTES, hop_timeout_s, entry.name, security)
        self.info: stage_pb2.DescribeResponse | None = None
        self.problem = f"host {entry.name} at {entry.address} was not reached yet"
        """Why no request can use this host; empty when one can."""
        self._ended: list[str] = []
        """Sessions that are about to be freed there."""

    async def describe(self) -> None:
        """Refresh `info` and `problem`. Raises Refusal when the host does not answer."""
        info = await self.relay.describe(timeout=self.relay.hop_timeout_s)
        self.info = info
        if tuple(info.blocks) != self.entry.blocks:
            self.problem = (
                f"host {self.entry.name} at {self.entry.address} holds blocks {list(info.blocks)}, "
                f"the topology says {list(self.entry.blocks)}"
            )
        elif not info.ready:
            self.problem = f"host {self.entry.name} is not ready: {info.not_ready_reason}"
        else:
            self.problem = ""

    async def events(self) -> AsyncIterator[stage_pb2.Events]:
        """Messages of the subscription; the first, when it is open, is empty."""
        async for events in self.relay.stub.Subscribe(stage_pb2.SubscribeRequest(router=self.router)):
            yield events

    async def release(self, session: str) -> None:
        """Free a session, together with others that end at about the same time."""
        self._ended.append(session)
        if len(self._ended) > 1:
            return
        await asyncio.sleep(RELEASE_AFTER_S)
        ended, self._ended = self._ended, []
        with suppress(grpc.aio.AioRpcError):
            await self.relay.stub.Release(stage_pb2.ReleaseRequest(sessions=ended), timeout=RELEASE_TIMEOUT_S)


class Session:
    """One request's place on the hosts: pushes go to the first host, events come from any."""

    def __init__(self, ring: Ring, name: str, kind: Kind, capacity: int, deadline_unix_ms: int) -> None:
        self.ring, self.name, self.kind = ring, name, kind
        self.capacity, self.deadline_unix_ms = capacity, deadline_unix_ms
        self.inbox: asyncio.Queue[stage_pb2.Event] = asyncio.Queue()

    async def push(self, work: stage_pb2.Sweep | stage_pb2.Step) -> None:
        """Start a sweep or the first of some AR steps. Raises Refusal."""
        hop = stage_pb2.Hop(
            router=self.ring.name,
            session=self.name,
            deadline_unix_ms=self.deadline_unix_ms,
            digest=self.ring.digest(self.kind),
            capacity=self.capacity,
        )
        if isinstance(work, stage_pb2.Sweep):
            hop.sweep.CopyFrom(work)
        else:
            hop.step.CopyFrom(work)
        if self.ring.settings.route == "ring":
            await self.ring.links[0].relay.push(hop)
        else:
            self.ring.spawn(self._call(hop))

    async def _call(self, hop: stage_pb2.Hop) -> None:
        """Have the hosts do `hop`, and the AR steps after it, as calls that return."""
        try:
            event = await self._around(hop)
            self.inbox.put_nowait(event)
            while hop.WhichOneof("work") == "step" and hop.step.remaining > 1:
                hop = next_step(hop, event.text)
                event = await self._around(hop)
                self.inbox.put_nowait(event)
        except Refusal as refusal:
            fault = stage_pb2.Fault(code=refusal.number, message=refusal.message)
            self.inbox.put_nowait(stage_pb2.Event(session=self.name, fault=fault))

    async def _around(self, hop: stage_pb2.Hop) -> stage_pb2.Event:
        onward = self.ring.settings.route == "nested"
        for link in self.ring.links:
            outcome = await link.relay.run(hop, onward)
            if isinstance(outcome, stage_pb2.Event):
                return outcome
            hop = outcome
        raise Refusal(grpc.StatusCode.INTERNAL, "the last host handed a hop on instead of ending it")

    async def event(self) -> stage_pb2.Event:
        """The next result. Raises Refusal for a fault on any host, when one is lost, or at the deadline."""
        try:
            async with asyncio.timeout(self.deadline_unix_ms / 1000 - time.time()):
                event = await self.inbox.get()
        except TimeoutError:
            raise Refusal(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the hosts sent a result"
            ) from None
        if event.WhichOneof("outcome") == "fault":
            source = f"{event.fault.host}: " if event.fault.host else ""
            raise Refusal.numbered(event.fault.code, source + event.fault.message)
        return event


class Ring:
    """Links to every host of a topology, subscribed, warmed and kept warm."""

    def __init__(
        self,
        topology: Topology,
        settings: RingSettings | None = None,
        security: Security = LOOPBACK_ONLY,
        owner: str = "",
    ) -> None:
        """:param owner: what the router's certificate calls it: hosts let it listen under that name only."""
        self.topology, self.settings = topology, settings or RingSettings()
        self.name = ".".join([*([owner] if owner else []), secrets.token_hex(8)])
        timeout_s = self.settings.hop_timeout_s
        self.links = [HostLink(host, self.name, timeout_s, security) for host in topology.hosts]
        self.sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start linking; returns at once. `problem` says when the ring can be used."""
        for link in self.links:
            self.spawn(self._keep_linked(link))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.links:
            await link.relay.close()

    @property
    def problem(self) -> str:
        """Why requests cannot be served now; empty when they can."""
        for link in self.links:
            if link.problem:
                return link.problem
        for kind in KINDS:
            digests = {link.entry.name: self._digest(link, kind) for link in self.links}
            if len(set(digests.values())) > 1:
                shown = ", ".join(f"{name} {digest[:12] or '(none)'}" for name, digest in digests.items())
                return f"the hosts have different {kind} checkpoints ({shown}): give every host the same one"
        return ""

    async def usable(self, wait_s: float) -> None:
        """Return when requests can be served. Raises Refusal with the problem and how long it was waited for."""
        waited = 0.0
        while problem := self.problem:
            if waited >= wait_s:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{problem} (waited {wait_s:.1f} s)")
            await asyncio.sleep(RETRY_S)
            waited += RETRY_S

    def model(self, kind: Kind) -> stage_pb2.ModelInfo | None:
        """The hosts' common model of a kind, if they have one. Meaningful while there is no `problem`."""
        info = self.links[0].info
        if info is None or not info.HasField(kind):
            return None
        model: stage_pb2.ModelInfo = getattr(info, kind)
        return model

    def digest(self, kind: Kind) -> str:
        model = self.model(kind)
        return model.digest if model else ""

    @asynccontextmanager
    async def session(self, kind: Kind, capacity: int, deadline_unix_ms: int) -> AsyncIterator[Session]:
        """A session that is freed on every host at the end, however it ends."""
        session = Session(self, secrets.token_hex(16), kind, capacity, deadline_unix_ms)
        self.sessions[session.name] = session
        try:
            yield session
        finally:
            del self.sessions[session.name]
            for link in self.links:
                self.spawn(link.release(session.name))

    async def _keep_linked(self, link: HostLink) -> None:
        """Subscribe to a host, for ever; a lost subscription fails the requests under way."""
        while True:
            keeper: asyncio.Task[None] | None = None
            try:
                async for events in link.events():
                    if keeper is None:
                        keeper = asyncio.create_task(self._keep_fresh(link))
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
        """Keep a link warm and its description current."""
        pause_s = self.settings.keep_warm_s
        warmer = asyncio.create_task(link.relay.keep_warm(WARM_BYTES, pause_s)) if pause_s else None
        try:
            while True:
                before = link.problem
                try:
                    await link.describe()
                    if link.problem != before:
                        log.info("%s", link.problem or f"host {link.entry.name} is ready")
                except Refusal as refusal:
                    self._lose(link, refusal.message)
                await asyncio.sleep(1.0 if not link.problem else RETRY_S)
        finally:
            if warmer is not None:
                warmer.cancel()

    def _deliver(self, event: stage_pb2.Event) -> None:
        session = self.sessions.get(event.session)
        if session is not None:  # else the client has gone
            session.inbox.put_nowait(event)

    def _lose(self, link: HostLink, reason: str) -> None:
        name = f"host {link.entry.name} at {link.entry.address}"
        # a reason that names the host already says what happened and what to do
        problem = reason if reason.startswith(name) else f"{name} is lost ({reason}); see that it runs"
        if not link.problem:
            log.warning("%s", problem)
        link.problem = problem
        fault = stage_pb2.Fault(code=grpc.StatusCode.UNAVAILABLE.value[0], message=problem)
        for session in self.sessions.values():
            session.inbox.put_nowait(stage_pb2.Event(session=session.name, fault=fault))

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _digest(link: HostLink, kind: Kind) -> str:
        return "" if link.info is None else str(getattr(link.info, kind).digest)
