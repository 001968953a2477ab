"""A block host: accepts hops, runs its parts on them, and hands them on."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from stages.admission import check_push
from stages.hop import Outcome, next_step, run_hop
from stages.parts import HostPlan, Parts
from stages.refusal import Refusal, exhausted
from stages.relay import Relay
from stages.sessions import Session, SessionStore
from stages.subscribers import Subscribers
from stages.transport import check_name
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostSettings:
    """Limits of one stage server."""

    name: str
    queue_limit: int = 64
    """Hops waiting for the processor; one more is refused."""
    session_mb: int = 256
    """Memory for KV caches."""
    lease_s: float = 60.0
    """A session unused for this long is freed."""
    hop_timeout_s: float = 5.0
    """How long to wait for the next host to take a hop."""

    def __post_init__(self) -> None:
        check_name(self.name, "host name")


@dataclass(frozen=True)
class Job:
    """One accepted hop."""

    request: stage_pb2.PushRequest
    session: Session
    received_bytes: int
    accepted_at: float


class Host:
    """Everything between a Push and what follows from it. Lives on the event loop; arithmetic has its own thread."""

    def __init__(self, plan: HostPlan, settings: HostSettings, relay: Relay | None) -> None:
        """:param relay: the next host; None where one host is the whole ring."""
        self.plan, self.settings, self.relay = plan, settings, relay
        self.parts: Parts | None = None
        self.stopping = False
        """No new session is opened any more."""
        self.sessions = SessionStore(settings.session_mb << 20, settings.lease_s)
        self.subscribers = Subscribers()
        self.queue: asyncio.Queue[Job] = asyncio.Queue(settings.queue_limit)
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.counters = stage_pb2.Counters()
        self._handovers: set[asyncio.Task[None]] = set()

    def accept(self, request: stage_pb2.PushRequest, received_bytes: int) -> None:
        """Check a hop and queue it. Raises Refusal; nothing has changed then."""
        try:
            self._admit(request, received_bytes)
        except Refusal:
            self.counters.refused += 1
            raise

    async def work(self) -> None:
        """Compute hops in their order, for ever."""
        while True:
            job = await self.queue.get()
            try:
                await self._work_on(job)
            except Refusal as refusal:
                self._fault(job.request, refusal)
            except Exception:
                log.exception("session %s: a hop failed", job.request.session)
                self._fault(job.request, Refusal(grpc.StatusCode.INTERNAL, "a hop failed; the host's log says why"))
            finally:
                job.session.pending -= 1

    def release(self, names: list[str]) -> int:
        """Free sessions; returns how many there were."""
        return sum(self.sessions.release(name) for name in names)

    async def close(self) -> None:
        """Let go of threads and hand-overs under way."""
        for task in self._handovers:
            task.cancel()
        await asyncio.gather(*self._handovers, return_exceptions=True)
        self.compute.shutdown(wait=False, cancel_futures=True)

    def counters_now(self) -> stage_pb2.Counters:
        counters, store = self.counters, self.sessions
        counters.sessions, counters.session_bytes = len(store.sessions), store.bytes
        counters.session_bytes_limit = store.budget_bytes
        counters.queued, counters.queue_limit = self.queue.qsize(), self.settings.queue_limit
        return counters

    def _admit(self, request: stage_pb2.PushRequest, received_bytes: int) -> None:
        if self.parts is None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{self.settings.name} is still loading its weights")
        kind = check_push(request, self.plan)
        if request.router not in self.subscribers:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, f"router {request.router!r} does not listen here: subscribe first"
            )
        if self.queue.full():
            raise exhausted(f"{self.settings.name} has {self.queue.maxsize} hops waiting", retry_after_ms=500)
        work = request.sweep if kind == "chain" else request.step
        start = request.sweep.clean_start if kind == "chain" else request.step.start
        if work.number == 0 and start == 0:
            source = self.plan.model(kind)
            assert source is not None
            if self.stopping:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{self.settings.name} is stopping")
            session = self.sessions.open(
                request.session, request.router, kind, request.capacity, source.manifest, self.parts
            )
        else:
            session = self.sessions.due(request.session, kind, work.number, start)
            if start + len(work.clean) > session.capacity:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"the session holds {session.capacity} positions only")
        session.next_number += 1
        session.length += len(work.clean)
        session.pending += 1
        self.queue.put_nowait(Job(request, session, received_bytes, time.perf_counter()))

    async def _work_on(self, job: Job) -> None:
        if not self._wanted(job):
            return
        begin = time.perf_counter()
        outcome = await asyncio.get_running_loop().run_in_executor(self.compute, self._compute, job)
        self.counters.completed += 1
        if self._wanted(job):
            self.sessions.renew(job.session)
            self._hand_over(job, outcome, begin)

    def _wanted(self, job: Job) -> bool:
        """Whether the session is still open: nobody waits for the result of one that was released meanwhile."""
        return self.sessions.sessions.get(job.request.session) is job.session

    def _compute(self, job: Job) -> tuple[Outcome, float]:
        """What comes after this host, and the milliseconds that it took. Runs on the compute thread."""
        if job.request.deadline_unix_ms <= time.time() * 1000:
            raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed while the work was waiting")
        assert self.parts is not None
        begin = time.perf_counter()
        outcome = run_hop(job.request, job.session, self.parts, following=self.plan.blocks[-1] + 1)
        return outcome, (time.perf_counter() - begin) * 1000

    def _hand_over(self, job: Job, outcome: tuple[Outcome, float], begin: float) -> None:
        message, compute_ms = outcome
        passages = [*job.request.passages]
        passages.append(
            stage_pb2.Passage(
                host=self.settings.name,
                queue_ms=(begin - job.accepted_at) * 1000,
                compute_ms=compute_ms,
                received_bytes=job.received_bytes,
            )
        )
        if isinstance(message, stage_pb2.PushRequest):
            del message.passages[:]
            message.passages.extend(passages)
            self._push(message)
            return
        message.passages.extend(passages)
        # the next step starts before the router is told: its trip round the ring is what the user waits for
        if job.request.WhichOneof("work") == "step" and job.request.step.remaining > 1:
            self._push(next_step(job.request, message.text))
        self.subscribers.publish(job.request.router, message)

    def _push(self, request: stage_pb2.PushRequest) -> None:
        task = asyncio.create_task(self._push_or_fault(request))
        self._handovers.add(task)
        task.add_done_callback(self._handovers.discard)

    async def _push_or_fault(self, request: stage_pb2.PushRequest) -> None:
        try:
            if self.relay is None:
                self.accept(request, received_bytes=0)
            else:
                await self.relay.push(request)
        except Refusal as refusal:
            self._fault(request, refusal)

    def _fault(self, request: stage_pb2.PushRequest, refusal: Refusal) -> None:
        """Tell the router that a request ends here."""
        self.counters.faults += 1
        self.sessions.release(request.session)
        work = request.sweep if request.WhichOneof("work") == "sweep" else request.step
        fault = stage_pb2.Fault(code=refusal.number, message=refusal.message, host=self.settings.name)
        self.subscribers.publish(
            request.router, stage_pb2.Event(session=request.session, number=work.number, fault=fault)
        )
