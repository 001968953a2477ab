"""The router's side of the ring: a warm link to every host, which also carries sessions' results back."""

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from serving.router.audit import Auditor, Quarantine
from serving.router.host_link import Attempt, HostLink, HostPath, Weights
from serving.router.paths import RETURN_S, Hedging, Patience, Suspects, best_path, problem_of
from serving.router.session import Session, Steps
from serving.router.settings import RingSettings
from serving.router.topology import HostEntry
from stages.clock import monotonic
from stages.host.metrics import LinkTable
from stages.host.next_hosts import MAX_TOGETHER
from stages.host.plan import MODEL_KINDS, ModelKind
from stages.host.prefixes import KEY_BYTES
from stages.threads import cancelled
from stages.v1 import stage_pb2
from stages.wire.link_quality import LinkRecord
from stages.wire.status import NoMessageError, StatusError, internal, unavailable
from stages.wire.tls import LOOPBACK_ONLY, Security

if TYPE_CHECKING:
    from serving.router.own_models import ReferenceVerifier

T = TypeVar("T")

log = logging.getLogger(__name__)

RETRY_S = 0.2
MAX_REPLAYS = 8  # Most replays at once over all hosts; further ones wait until one of these has a result.
DESCRIBE_S, IDLE_DESCRIBE_S = 1.0, 3.0  # Pause between two descriptions of a host, and of an idle one.
WATCH_S = 0.2
# Added to the longest wait of an audit: calls to a host that is taken out should still get their answers.
CLOSE_S = 1.0
WARM_BYTES = 16 << 10


class Ring:
    """Links to every host, subscribed, warmed and kept warm, and the paths through them."""

    clock = staticmethod(monotonic)

    def __init__(
        self,
        settings: RingSettings | None = None,
        verifier: "ReferenceVerifier | None" = None,
        security: Security = LOOPBACK_ONLY,
        owner: str = "",
        findings: Path | None = None,
        run: Path | None = None,
    ) -> None:
        """:param verifier: decides when hosts disagree.
        :param owner: the router's name in its certificate: hosts let it subscribe under that name only.
        :param findings: file of audits' findings; None: they end with this process.
        :param run: directory of certificates, which also records links if machines joined."""
        self.settings, self.owner, self.run = settings or RingSettings(), owner, run
        self.name = ".".join([*([owner] if owner else []), secrets.token_hex(8)])
        self.security = security
        self._looked_at = monotonic()
        self.suspects, self.hedging, self.patience = Suspects(), Hedging(), Patience(self.settings.hop_timeout_s)
        self.auditor = Auditor(self, self.settings.audit_share, verifier)
        self.links: list[HostLink] = []
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, Attempt] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._quarantine = Quarantine(findings)
        self.changes = 0  # counts events that may change the best path, or leave none
        self.counters = LinkTable()  # by name of the host

    def set_hosts(self, hosts: Sequence[HostEntry]) -> None:
        """Link to exactly these hosts; work on a removed host moves to others. A RingView's `problem` says when the
        ring can be used.

        Raises InputError if one may not be dialled: the ring stays as it was.
        """
        # make new links before old ones go: if one may not be dialled, nothing has changed yet
        before = {link.entry: link for link in self.links}
        self.links = [before.pop(entry) if entry in before else self._link(entry) for entry in hosts]
        for entry, link in before.items():
            self._lose(link, f"host {entry.name} at {entry.address} is no longer in the topology")
            self._keepers.pop(entry.address).cancel()
            self.spawn(link.relay.close(self.settings.hop_timeout_s + CLOSE_S))
        for link in self.links:
            if link.entry.address not in self._keepers:
                self._keepers[link.entry.address] = self.spawn(self._keep_linked(link))

    async def close(self) -> None:
        await cancelled(self._tasks)
        for link in self.links:
            await link.relay.close()

    def choose(self, weights: Weights, avoid: Collection[str] = (), prefixes: Sequence[bytes] = ()) -> HostPath | None:
        """The quickest path over hosts with `weights`, or one about as quick that caches more of `prefixes`, the
        digests of a text's beginnings, the shortest first. None without a path."""
        suspects = self.suspects.now(monotonic())
        return best_path(self.links, weights, suspects, avoid, prefixes) if self.links else None

    def begin(self, path: HostPath, receive: Callable[[Attempt, stage_pb2.Event], object]) -> Attempt:
        """Open a session on the hosts of `path`, until `end`; `receive` gets its results, and faults of lost hosts."""
        attempt = Attempt(path, receive)
        self._attempts[attempt.name] = attempt
        for link in path:
            link.sessions += 1
            link.relay.wake()
        return attempt

    def gives_up_at(self, since_s: float, most_s: float = RETURN_S) -> float:
        """When a request that has looked for a path since `since_s` gives up."""
        record = LinkRecord.read(self.run)
        return self.patience.ends_at(self.links, since_s, 0.0 if record.advice else most_s, joined=bool(record.proxy))

    def may_replay(self) -> bool:
        """True if one more request may replay: all at once would stall the remaining hosts."""
        return sum(attempt.replays for attempt in self._attempts.values()) < MAX_REPLAYS

    def end(self, attempt: Attempt) -> None:
        """Free an attempt's session on its hosts."""
        del self._attempts[attempt.name]
        for link in attempt.path:
            link.sessions -= 1
            self.spawn(link.release(attempt.name))

    async def take(self, session: Session, steps: Steps[T]) -> T:
        """Run a session's steps, and wait between them."""
        arrived = asyncio.Event()
        session.on_event = arrived.set
        try:
            while True:
                wait = next(steps)
                arrived.clear()
                if not wait.until_event:
                    await asyncio.sleep(wait.seconds)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait.seconds):
                        await arrived.wait()
        except StopIteration as ended:
            return ended.value

    def quarantine(self, link: HostLink, reason: str, finder: str = "an audit found that ") -> None:
        """Stop giving a host work; sessions that it worked for fail (`Session.event`)."""
        name = link.entry.name
        hours = self._quarantine.add(name, f"{finder}{reason}", link.instance)
        log.error("host %s is faulty: %s; it is quarantined for %d h", name, reason, hours)
        # its entry may have changed while the audit looked at it
        for each in {link, *(other for other in self.links if other.entry.name == name)}:
            each.quarantined, each.quarantined_until = self._quarantine.of(name)
            self._lose(each, each.quarantined)

    def spawn(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that ends with the ring; if it fails, the log says so."""

        def ended(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.critical("a job of the ring failed", exc_info=error)

        self._tasks.add(task := asyncio.create_task(job))
        task.add_done_callback(ended)
        return task

    def _link(self, entry: HostEntry) -> HostLink:
        link = HostLink(entry, self.settings.hop_timeout_s, self.security)
        link.quarantined, link.quarantined_until = self._quarantine.of(entry.name)
        link.relay.observer = self.counters.link(entry.name)
        return link

    async def _keep_linked(self, link: HostLink) -> None:
        """Stay subscribed to a host, for ever; a lost subscription fails the work in progress there."""
        while True:
            keeper: asyncio.Task[None] | None = None
            try:
                link.key = secrets.token_bytes(KEY_BYTES)
                call: Any = link.relay.stub.Subscribe(stage_pb2.SubscribeRequest(router=self.name, key=link.key))
                async with aclosing(aiter(call)) as messages:
                    async for events in messages:
                        if keeper is None:  # the first message is empty and says that the stream is open
                            keeper = self.spawn(self._keep_fresh(link))
                        if (count := len(events.events)) > MAX_TOGETHER:
                            raise internal(f"it sent {count} events in one message; at most {MAX_TOGETHER} are allowed")
                        for event in events.events:
                            self._deliver(event)
                self._lose(link, "it closed the connection")
            except (StatusError, NoMessageError) as error:  # a retry would bring the same again at once
                self.quarantine(link, error.message if isinstance(error, StatusError) else error.details() or "", "")
                await asyncio.sleep(link.quarantined_until - monotonic())
            except grpc.aio.AioRpcError as error:
                self._lose(link, link.relay.loss(error))
            finally:
                if keeper is not None:
                    keeper.cancel()
            await asyncio.sleep(RETRY_S)

    async def _keep_fresh(self, link: HostLink) -> None:
        """Keep a link warm and its description current. Requests use it once it is warm."""
        pause_s = self.settings.keep_warm_s
        warmer: asyncio.Task[None] | None = None
        try:
            while True:
                before = link.problem
                try:
                    if pause_s and warmer is None:
                        await link.relay.warm(WARM_BYTES)
                        warmer = asyncio.create_task(link.relay.keep_warm(WARM_BYTES, pause_s))
                    # a host holds a session while later hosts work, however long that takes
                    sessions = [name for name, each in self._attempts.items() if link in each.path]
                    await link.describe(sessions, self._quarantine.instances)
                    self.changes += 1
                    if link.problem != before:
                        log.info("%s", link.problem or f"host {link.entry.name} is ready")
                    self.spawn(link.release())
                except StatusError as refusal:
                    self._lose(link, refusal.message)
                usual_s = IDLE_DESCRIBE_S if link.relay.is_idle and not link.sessions else DESCRIBE_S
                await asyncio.sleep(RETRY_S if link.problem else usual_s)
        finally:
            if warmer is not None:
                warmer.cancel()

    async def watch(self) -> None:
        """Declare silent hosts lost, for ever: a frozen host, or one behind a cut link, closes no connection."""
        while True:
            await asyncio.sleep(WATCH_S)
            self.look()

    def look(self) -> None:
        """Declare the hosts lost that are silent now."""
        now = monotonic()
        stalled = now - self._looked_at > 3 * WATCH_S  # if so, this process itself stood still
        self._looked_at = now
        for link in self.links:
            if not stalled and not link.problem and (silent_s := link.silent_s()) is not None:
                self._lose(link, f"it has been silent for {silent_s:.1f} s", is_gone=False)

    def _deliver(self, event: stage_pb2.Event) -> None:
        attempt = self._attempts.get(event.session)
        if attempt is not None:  # else the client has left
            attempt.receive(attempt, event)

    def _lose(self, link: HostLink, reason: str, is_gone: bool = True) -> None:
        name = f"host {link.entry.name} at {link.entry.address}"
        # a reason that names the host is a complete sentence with a remedy
        joined = bool(LinkRecord.read(self.run).proxy)
        remedy = "machines that joined replace it, or add one" if joined else "check that it runs"
        problem = reason if reason.startswith(name) else f"{name} is lost ({reason}); {remedy}"
        link.lost_at = None if joined or link.quarantined else link.lost_at or monotonic()
        if link.lost_at and link.entry.address.startswith("127.0.0.1:"):  # a host of `up`
            problem += " (if `up` started it: `onesweep down`, then the same `onesweep up` again)"
        if not link.problem:
            log.warning("%s", problem)
        link.problem, link.relay.rtt_ms, self.changes = problem, None, self.changes + 1
        # Leaving a slow host is no use if only the same one can repeat the work.
        if not is_gone and not any(self.choose(weights) for weights in link.held):
            return
        fault = stage_pb2.Fault(code=grpc.StatusCode.UNAVAILABLE.value[0], message=problem, lost=link.entry.address)
        for attempt in list(self._attempts.values()):
            if link in attempt.path:
                attempt.fail(fault)


# The ring as one release's requests see it: only hosts that hold its weights.

# How long a found path stays valid: one request asks for it a dozen times.
CHECK_S = 0.02


class RingView:
    """A ring and one set of weights. Modes use this view, so all of a request's work is done with these weights."""

    def __init__(self, ring: Ring, weights: Weights = (), *, pinned: bool = True) -> None:
        """:param weights: empty = whatever the hosts hold, until `pin`.
        :param pinned: False = `unpin` them."""
        self.ring, self.settings, self._first = ring, ring.settings, weights
        self._weights, self.pinned = weights, pinned and bool(weights)
        self._release: stage_pb2.Release | None = None  # these weights as a host describes them
        self._has_path = False  # a path for them exists
        self._checked_until, self._seen = 0.0, -1

    @property
    def weights(self) -> Weights:
        """Digests in the order of KINDS. Meaningful while there is no `problem`, or once they are pinned."""
        self._look()
        return self._weights

    def pin(self) -> None:
        """Stay with these weights, whatever the hosts load later."""
        self._look()
        self.pinned, self._seen = bool(self._weights), -1

    @property
    def replaced(self) -> bool:
        """The hosts hold other models than those of the start, which the router's own belong to."""
        return any(first and held and first != held for first, held in zip(self._first, self.weights, strict=False))

    def unpin(self) -> None:
        """Prefer these weights, but use others if the hosts hold those."""
        self.pinned, self._seen = False, -1

    @property
    def problem(self) -> str:
        """Why requests cannot be served now; empty when they can."""
        if self._look():
            return ""
        return problem_of(self.ring.links, self._weights if self.pinned else None)

    async def usable(self, due_at: float = math.inf, return_s: float = RETURN_S) -> None:
        """Return when requests can be served. Raises StatusError with the problem and the time waited.

        :param due_at: the deadline, by the monotonic clock.
        :param return_s: longest wait for hosts that come back."""
        since_s, patience = monotonic(), self.ring.patience
        patience.waiting += 1
        try:
            while problem := self.problem:
                most_s = return_s if patience.waiting <= patience.most_waiting else 0.0
                now_s, ends_at = monotonic(), self.ring.gives_up_at(since_s, most_s)
                if now_s >= min(ends_at, due_at - 2 * RETRY_S):
                    raise unavailable(f"{problem} (waited {now_s - since_s:.1f} s)")
                await asyncio.sleep(RETRY_S)
        finally:
            patience.waiting -= 1

    @property
    def release(self) -> str:
        """The hosts' name for these weights; empty while no host has them."""
        self._look()
        return self._release.name if self._release else ""

    def model(self, kind: ModelKind) -> stage_pb2.ModelInfo | None:
        """The hosts' model of a kind, if any. Meaningful while there is no `problem`."""
        self._look()
        if self._release is None or not self._release.HasField(kind):
            return None
        return getattr(self._release, kind)

    def digest(self, kind: ModelKind) -> str:
        return self.weights[MODEL_KINDS.index(kind)] if self.weights else ""

    def rtts_ms(self) -> list[float | None]:
        """Round trips to the hosts of the path that a request would use now."""
        return [link.relay.min_rtt_ms for link in self.ring.choose(self.weights) or self.ring.links]

    def _look(self) -> bool:
        """Find weights that have a path: the current ones, else those that most hosts hold. False if none
        has one."""
        if self._seen == self.ring.changes and monotonic() <= self._checked_until:
            return self._has_path
        self._seen, self._checked_until = self.ring.changes, monotonic() + CHECK_S
        links = [link for link in self.ring.links if not link.problem]
        held = Counter(weights for link in links for weights in reversed(link.held))
        others = [] if self.pinned else [weights for weights, _ in held.most_common()]
        able = (each for each in (self._weights, *others) if each in held and self.ring.choose(each) is not None)
        found = next(able, None)
        self._has_path, self._weights = found is not None, found or self._weights
        described = (link.held[self._weights] for link in self.ring.links if self._weights in link.held)
        self._release = next(described, None)
        return self._has_path
