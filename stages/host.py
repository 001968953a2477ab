"""A block host: accepts hops, runs its parts on them, and hands them on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from stages.admission import check_hop
from stages.backends import DEFAULT_BACKEND
from stages.engine import Engine, Job
from stages.guesses import places, remembered
from stages.hop import Outcome, next_step
from stages.links import Links
from stages.meter import HostMeter
from stages.parts import Parts
from stages.pieces import MAX_PIECES
from stages.refusal import Refusal, exhausted, invalid
from stages.relay import KEEP_WARM_S, Relay
from stages.releases import Release, Releases
from stages.sessions import SessionStore
from stages.subscribers import Subscribers
from stages.traces import Tracer
from stages.transport import check_name
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostSettings:
    """Limits of one stage server."""

    name: str
    backend: str = DEFAULT_BACKEND
    """What computes this host's parts."""
    queue_limit: int = 64
    """Hops under way; one more is refused."""
    batch: int = 64
    """Most hops that share a forward pass; 1 = one after the other."""
    session_mb: int = 256
    """Memory for KV caches."""
    lease_s: float = 60.0
    """A session unused for this long is freed."""
    hop_timeout_s: float = 5.0
    """How long to wait for the next host to take a hop."""
    keep_warm_s: float = KEEP_WARM_S
    """Pause between messages that keep an idle link's congestion window open; 0 = none."""

    def __post_init__(self) -> None:
        check_name(self.name, "host name")


class Host:
    """Everything between a hop and what follows from it. Lives on the event loop; arithmetic has its own thread."""

    def __init__(
        self,
        first: Release,
        settings: HostSettings,
        links: Links,
        meter: HostMeter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """:param first: what it begins with; all that comes later holds the same blocks.
        :param links: to the hosts that may come next; none where this host holds a whole model."""
        self.releases, self.settings, self.links = Releases(first), settings, links
        self.blocks = first.plan.blocks
        self.meter, self.tracer = meter or HostMeter(), tracer
        self.stopping = False
        """No new session is opened any more."""
        self.sessions = SessionStore(settings.session_mb << 20, settings.lease_s)
        self.subscribers = Subscribers()
        self.engine = Engine(self.blocks[-1] + 1, settings.queue_limit, settings.batch, self.meter)
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.counters = stage_pb2.Counters()

    def accept(self, hop: stage_pb2.Hop, received_bytes: int) -> Job:
        """Check a hop and queue it; `take` has what is queued computed. Raises Refusal; nothing has changed then."""
        try:
            return self._admit(hop, received_bytes)
        except Refusal as refusal:
            self.counters.refused += 1
            self.meter.refused(refusal)
            raise

    def take(self, parcel: stage_pb2.Parcel) -> stage_pb2.Receipt:
        """Accept what can be accepted of a parcel."""
        receipt = stage_pb2.Receipt(number=parcel.number)
        for index, hop in enumerate(parcel.hops):
            try:
                self.accept(hop, hop.ByteSize())
            except Refusal as refusal:
                receipt.rejections.add(
                    index=index,
                    code=refusal.number,
                    message=refusal.message,
                    retry_after_ms=refusal.retry_after_ms or 0,
                )
        self._go()
        return receipt

    async def run(self, hop: stage_pb2.Hop, onward: bool) -> Outcome:
        """One hop's outcome; with `onward`, that of all hosts after this one, too. Raises Refusal."""
        job = self.accept(hop, hop.ByteSize())
        job.reply = asyncio.get_running_loop().create_future()
        self._go()
        outcome = await job.reply
        if onward and isinstance(outcome, stage_pb2.Hop):
            return await self.links.to(_address(outcome)).run(outcome, onward)
        return outcome

    async def work(self) -> None:
        """Compute hops, for ever."""
        loop = asyncio.get_running_loop()

        def deliver(jobs: list[Job]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._finish, jobs)

        try:
            await loop.run_in_executor(self.compute, self.engine.run, deliver)
        finally:
            self.engine.stop()

    def _go(self) -> None:
        self._finish(self.engine.go())

    def release(self, names: list[str]) -> int:
        """Free sessions; returns how many there were."""
        return sum(self.sessions.release(name) for name in names)

    def close(self) -> None:
        """Let go of the thread."""
        self.engine.stop()
        self.compute.shutdown(wait=False, cancel_futures=True)

    def counters_now(self) -> stage_pb2.Counters:
        counters, store = self.counters, self.sessions
        counters.sessions, counters.session_bytes = len(store.sessions), store.bytes
        counters.session_bytes_limit = store.budget_bytes
        counters.queued, counters.queue_limit = len(self.engine), self.settings.queue_limit
        return counters

    def _admit(self, hop: stage_pb2.Hop, received_bytes: int) -> Job:
        parts = self._parts_for(hop)
        kind = check_hop(hop, parts.plan)
        if hop.router not in self.subscribers:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, f"router {hop.router!r} does not listen here: subscribe first"
            )
        if self.engine.full and not self.sessions.in_pieces(hop.session):
            raise exhausted(f"{self.settings.name} has {self.engine.limit} hops under way", retry_after_ms=500)
        work = hop.sweep if kind == "chain" else hop.step
        start = hop.sweep.clean_start if kind == "chain" else hop.step.start
        depths = () if kind == "chain" else hop.step.depths
        symbols = parts.alphabet(kind).count(work.clean)
        if start == 0:
            source = parts.plan.model(kind)
            assert source is not None
            if self.stopping:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{self.settings.name} is stopping")
            session = self.sessions.open(hop.session, hop.router, kind, hop.capacity, source.manifest, parts)
            session.next_number = work.number  # a replay goes on where another host's session ended
        else:
            session = self.sessions.due(hop.session, kind, work.number, start)
            if start + places(symbols, depths) > session.capacity:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"the session holds {session.capacity} positions only")
            if hop.step.more and session.pieces + 1 >= MAX_PIECES:
                raise invalid(f"more than {MAX_PIECES} pieces of one step")
        session.accepted(start + remembered(symbols, depths), more=hop.step.more)
        session.pending += 1
        job = Job(hop, session, received_bytes)
        self.engine.submit(job)
        return job

    def _parts_for(self, hop: stage_pb2.Hop) -> Parts:
        """A session ends with the weights that it began with."""
        session = self.sessions.sessions.get(hop.session)
        return self.releases.parts_for(hop.digest) if session is None else session.parts

    def _finish(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.session.pending -= 1
            assert job.result is not None
            if isinstance(job.result, Refusal):
                self._give_up(job, job.result)
            else:
                self.counters.completed += 1
                self._go_on(job, job.result)
            self.meter.ended(job)
            if self.tracer is not None and job.hop.traceparent:
                self.tracer.ended(job)

    def _give_up(self, job: Job, refusal: Refusal) -> None:
        if job.reply is None:
            if not job.session.released:
                self._fault(job.hop, refusal)
            return
        self._book_fault(job.hop, refusal)
        self.sessions.release(job.hop.session)
        if not job.reply.done():
            job.reply.set_exception(refusal)

    def _go_on(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, stage_pb2.Event):
            outcome.passages.extend(job.hop.passages)
        outcome.passages.add(
            host=self.settings.name,
            queue_ms=job.queue_ms,
            compute_ms=job.compute_ms,
            received_bytes=job.received_bytes,
        )
        if isinstance(outcome, stage_pb2.Hop):
            _move_on(outcome)
        else:
            job.session.add_up(outcome, more=job.hop.step.more)
        self.sessions.renew(job.session)
        if job.reply is not None:
            if not job.reply.done():
                job.reply.set_result(outcome)
        elif not job.session.released:
            self._hand_over(job, outcome)

    def _hand_over(self, job: Job, outcome: Outcome) -> None:
        hop = job.hop
        if isinstance(outcome, stage_pb2.Hop):
            self._push(outcome)
            return
        if hop.step.more:
            return  # something comes out of the last piece
        # the next step starts before the router is told: its trip round the ring is what the user waits for
        if hop.WhichOneof("work") == "step" and hop.step.remaining > 1:
            after = next_step(hop, outcome.text, job.session.alphabet)
            _move_on(after)
            self._push(after)
        self.subscribers.publish(hop.router, outcome)

    def _push(self, hop: stage_pb2.Hop) -> None:
        try:
            if not self._ends_here(hop):
                self._send(hop, self.links.to(_address(hop)))
                return
            self.accept(hop, received_bytes=0)
        except Refusal as refusal:
            self._fault(hop, refusal)
            return
        asyncio.get_running_loop().call_soon(self._go)  # not at once: a whole text would be one call in another

    def _send(self, hop: stage_pb2.Hop, relay: Relay) -> None:
        def settled(refusal: Refusal | None) -> None:
            if refusal is not None:
                self._fault(hop, refusal, relay.address)

        relay.send(hop, settled)

    def _ends_here(self, hop: stage_pb2.Hop) -> bool:
        """Whether this host is the whole ring of a sweep."""
        return len(hop.path) == 1 if hop.path else not self.links.relays

    def _fault(self, hop: stage_pb2.Hop, refusal: Refusal, lost: str = "") -> None:
        """Tell the router that a request ends here. `lost`: the host that did not take it over."""
        self._book_fault(hop, refusal)
        self.sessions.release(hop.session)
        work = hop.sweep if hop.WhichOneof("work") == "sweep" else hop.step
        fault = stage_pb2.Fault(code=refusal.number, message=refusal.message, host=self.settings.name, lost=lost)
        self.subscribers.publish(hop.router, stage_pb2.Event(session=hop.session, number=work.number, fault=fault))

    def _book_fault(self, hop: stage_pb2.Hop, refusal: Refusal) -> None:
        self.counters.faults += 1
        self.meter.faulted(refusal)
        names = {"request": hop.request, "session": hop.session, "code": refusal.code.name}
        log.warning("request %s ends here: %s", hop.request or "without a name", refusal.message, extra=names)


def _move_on(hop: stage_pb2.Hop) -> None:
    """Address a hop to the host after the one that made it."""
    if hop.path:
        hop.place = (hop.place + 1) % len(hop.path)


def _address(hop: stage_pb2.Hop) -> str:
    """Of the host that a hop is for; empty where it says nothing of its path."""
    return hop.path[hop.place] if hop.path else ""
