"""A block host: accepts hops, runs its parts on them, and forwards the results."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from stages.clock import monotonic
from stages.host.admission import HopAdmission
from stages.host.metrics import HostCounters
from stages.host.next_hosts import NextHosts, Subscribers
from stages.host.parts import Release, Releases
from stages.host.prefixes import Beginning, PrefixStore
from stages.host.scheduler import QUICK_MS, ScheduledHop, Scheduler
from stages.host.sessions import SessionStore
from stages.host.settings import HostSettings
from stages.v1 import stage_pb2
from stages.wire.messages import PROTOCOL, Outcome, hops_refusal, seconds_until, work_of
from stages.wire.status import Code, StatusError

STEPPING_S = 1.0  # a text with an older last step is waiting for its user or a far link

log = logging.getLogger(__name__)


class Host:
    """Turns hops into results and further hops. Lives on the event loop; arithmetic has its own thread."""

    def __init__(self, first: Release, settings: HostSettings, next_hosts: NextHosts) -> None:
        """:param first: the releases to begin with; all later ones hold the same blocks.
        :param next_hosts: links to the hosts that may come next; none if this host holds a whole model."""
        self.releases, self.settings, self.next_hosts = Releases(first), settings, next_hosts
        self.blocks = first.plan.blocks
        self.instance = f"{settings.name}/{secrets.token_hex(4)}"
        """Name of this process; its caches end with it."""
        self.sessions = SessionStore(settings.session_mb << 20, settings.lease_s)
        self.prefixes = PrefixStore(settings.prefix_mb << 20)
        self.admission = HopAdmission(settings, self.releases, self.sessions, self.prefixes)
        self.subscribers = Subscribers()
        self.counters = HostCounters(next_hosts.counters)
        self.scheduler = Scheduler(self.blocks[-1] + 1, settings.queue_limit, settings.batch, self.counters.taken)
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._going: asyncio.TimerHandle | None = None  # steps wait until then to share a pass
        self.stall_s = 0.0
        """Longest recent pause of the event loop, in seconds."""

    def accept(self, hop: stage_pb2.Hop, received_bytes: int, sender: str = "") -> ScheduledHop:
        """Check a hop and queue it; the scheduler computes it. Raises StatusError, and then nothing has changed.

        :param sender: the host that sent it; empty for a router, and without TLS."""
        try:
            key, is_full = self.subscribers.key(hop.router), self.scheduler.full
            job = self.admission.admit(hop, received_bytes, sender, key, is_full, monotonic())
        except StatusError as refusal:
            if refusal.code is not Code.CANCELLED:  # hosts write on until they hear that a text has its length
                self.counters.refusals[refusal.code.name] += 1
            raise
        self.scheduler.submit(job)
        return job

    def take(self, batch: stage_pb2.HopBatch, sender: Callable[[stage_pb2.Hop], str] | None = None) -> stage_pb2.Ack:
        """Accept the hops of a batch, and start them together; the ack lists the refused ones.

        :param sender: gives the host that sent a hop, or an empty name; None without TLS. Raises StatusError if that
            host may not send the hop."""
        ack = stage_pb2.Ack(number=batch.number)
        for index, hop in enumerate(batch.hops):
            try:
                if batch.protocol != PROTOCOL:  # its fields would be misread
                    raise hops_refusal(batch.protocol, "the sender", f"host {self.settings.name}")
                self.accept(hop, hop.ByteSize(), sender(hop) if sender else "")
            except StatusError as refusal:
                ack.rejections.add(
                    index=index,
                    code=refusal.number,
                    message=refusal.message,
                    retry_after_ms=refusal.retry_after_ms or 0,
                )
        if (wait_s := self._wait_s()) and self._going is None:
            self._going = asyncio.get_running_loop().call_later(wait_s, self._go)
        elif not wait_s:
            self._go()
        return ack

    async def work(self) -> None:
        """Compute hops forever."""
        loop = asyncio.get_running_loop()

        def deliver(jobs: list[ScheduledHop]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._finish, jobs)

        try:
            await loop.run_in_executor(self.compute, self.scheduler.run, deliver)
        finally:
            self.scheduler.stop()

    def _wait_s(self) -> float:
        if self.blocks[0]:  # on the first host only: steps that met once stay together
            return 0.0
        since = monotonic() - STEPPING_S
        stepping = sum(session.stepped_at > since for session in self.sessions.sessions.values())
        return batching_wait_s(self.scheduler.arrived, stepping, self.scheduler.steps_ms)

    def _go(self) -> None:
        if self._going is not None:
            self._going.cancel()
            self._going = None
        self._finish(self.scheduler.go())

    async def end(self, names: list[str]) -> int:
        """Free the sessions of requests that ended, and keep their text in the prefix cache; returns their number."""
        count = 0
        for name in names:
            session = self.sessions.sessions.get(name)
            kept = session.beginning if session is not None and self.prefixes.budget_bytes else None
            # Caches that still lack recalled pieces would be kept incomplete.
            if session is not None and kept is not None and not kept.recalled:
                session.released = True  # no request waits for it, but its caches are in use until all is copied
                beginning = Beginning(kept.root, kept.before, list(kept.digests))
                for at in range(len(beginning.digests)):
                    self.prefixes.keep(beginning, at, session.layers, session.tokens)
                    await asyncio.sleep(0)  # copying a piece takes up to a millisecond: let hops run in between
            count += self.sessions.release(name, is_over=True)
        return count

    def close(self) -> None:
        """Shut the thread down."""
        self.scheduler.stop()
        self.compute.shutdown(wait=False, cancel_futures=True)

    def counters_now(self) -> stage_pb2.Counters:
        counters, store, prefixes = self.counters, self.sessions, self.prefixes
        return stage_pb2.Counters(
            completed=counters.completed,
            refused=counters.refusals.total(),
            faults=counters.faults.total(),
            sessions=len(store.sessions),
            session_bytes=store.bytes,
            session_bytes_limit=store.budget_bytes,
            queued=len(self.scheduler),
            queue_limit=self.settings.queue_limit,
            prefix_bytes=prefixes.bytes,
            prefix_bytes_limit=prefixes.budget_bytes,
            prefix_hits=prefixes.hits,
            prefix_positions=prefixes.positions,
        )

    def _finish(self, jobs: list[ScheduledHop]) -> None:
        for job in jobs:
            job.session.pending -= 1
            self.admission.queued_bytes -= job.received_bytes
            assert job.result is not None
            if isinstance(job.result, StatusError):
                if not job.session.released:
                    self._fault(job.work.hop, job.result)
            else:
                self._continue(job, job.result)
            self.counters.ended(job)

    def _continue(self, job: ScheduledHop, outcome: Outcome) -> None:
        publish = partial(self.subscribers.publish, job.work.hop.router)
        for each in self.admission.computed(job, outcome, monotonic()):
            if isinstance(each, stage_pb2.Event):
                publish(each)
                continue
            self._push(each, job.due_at)
            if job.work.preview is not None:
                # made on a separate thread, so neither hops nor the event loop wait for it
                made = asyncio.get_running_loop().run_in_executor(None, job.work.preview)
                made.add_done_callback(lambda done: None if done.cancelled() else publish(done.result()))

    def _push(self, hop: stage_pb2.Hop, due_at: float) -> None:
        hop.left_s = seconds_until(due_at)
        following = hop.path[hop.place] if len(hop.path) > 1 else ""
        try:
            # this host is the whole ring
            if len(hop.path) <= 1 and (hop.path or not self.next_hosts.relays):
                self.accept(hop, received_bytes=0)
                # not at once: the calls for a whole text would nest
                asyncio.get_running_loop().call_soon(self._go)
                return
            relay = self.next_hosts.to(following)
        except StatusError as refusal:
            self._fault(hop, refusal, following)
            return
        size = hop.ByteSize()
        self.admission.queued_bytes += size  # the message is held here until the next host has it

        def settled(refusal: StatusError | None) -> None:
            self.admission.queued_bytes -= size
            if refusal is not None:
                self._fault(hop, refusal, relay.address)

        relay.send(hop, settled)

    def _fault(self, hop: stage_pb2.Hop, refusal: StatusError, lost: str = "") -> None:
        """Tell the router that a request ends here. `lost`: the next host, which did not accept the hop."""
        # a session released at its last token may have another hop under way; a restarted host knows of no sessions
        is_over = refusal.code is Code.CANCELLED or hop.session in self.sessions.released
        if not is_over:
            self.counters.faults[refusal.code.name] += 1
        names = {"request": hop.request, "session": hop.session, "code": refusal.code.name}
        level = logging.INFO if is_over else logging.WARNING
        log.log(level, "request %s ended: %s", hop.request or "(unnamed)", refusal.message, extra=names)
        self.sessions.release(hop.session)
        number = work_of(hop).number
        fault = stage_pb2.Fault(code=refusal.number, message=refusal.message, host=self.settings.name, lost=lost)
        self.subscribers.publish(hop.router, stage_pb2.Event(session=hop.session, number=number, fault=fault))


def batching_wait_s(arrived: Sequence[ScheduledHop], stepping: int, pass_ms: float) -> float:
    """Seconds for which AR steps wait for steps of other texts, at most a quick pass. As many groups as hosts keep a
    ring busy; smaller groups never merge by themselves, and each costs every host a pass and a message.

    :param stepping: number of texts being written.
    :param pass_ms: duration of the last pass."""
    if not arrived or pass_ms >= QUICK_MS:  # during longer passes other steps arrive anyway
        return 0.0
    is_few = len(arrived) < stepping // max(len(arrived[0].work.hop.path), 1)
    return pass_ms / 1000 if is_few and all(job.work.is_step and not job.work.is_prefill for job in arrived) else 0.0
