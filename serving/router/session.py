"""One request's session on the hosts: work goes out, results come back, and failed work is repeated elsewhere.
The ring does its waiting and passes the time.

Hosts that die, freeze, are cut off or answer nonsense cost a request time, never its text: the session knows the text
and the pieces in which it was read, and any other hosts with the same blocks continue from there to the same bytes. AR
steps give the same tokens for any pieces. Sweeps and scores do not: KV caches of the same tokens read in other pieces
differ in the last bits, and a near tie could fall the other way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from serving.router.accounting import Account
from serving.router.answer import AuditedAnswer
from serving.router.audit import AuditFailed
from serving.router.host_link import Attempt, HostLink, HostPath
from serving.router.journal import PAUSE_S, Journal, Tries
from serving.router.paths import cached_by, problem_of
from stages.host.plan import MODEL_KINDS, ModelKind
from stages.model.prefill import ATTEND_POSITIONS, prefix_digests, prefix_root
from stages.model.scoring import batch_rows
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import PictureMessage, Work, after_prefix, put_work, step_hops
from stages.wire.status import StatusError

if TYPE_CHECKING:
    from serving.router.ring import RingView

T = TypeVar("T")

# Raises StatusError for an impossible result.
Check = Callable[[stage_pb2.Event], object]


class Wait(NamedTuple):
    """A step's wait, in seconds or until an event arrives."""

    seconds: float
    until_event: bool  # an event ends the wait


# The work between waits; asyncio runs the steps, or an event heap in virtual time (loadtest/simulation).
Steps = Generator[Wait, None, T]


class Session:
    """One request's session on the hosts, used in a `with` block whose end frees it on every host.

    Its `journal` and `tries` decide. It passes them events and times and acts on the decisions: work goes out over the
    links of a path, and results come back. `pushing` and `result` are its steps, which do not wait themselves.
    """

    def __init__(self, view: RingView, kind: ModelKind, capacity: int, due_at: float, account: Account) -> None:
        """:param view: the hosts, and the weights that every try uses: one set generates the whole text.
        :param capacity: positions that the hosts reserve.
        :param due_at: the deadline, by the monotonic clock."""
        self.ring, self.kind, self.weights, self.capacity = view.ring, kind, view.weights, capacity
        self.model = view.model(kind) or stage_pb2.ModelInfo()
        self.vocabulary = Vocabulary(self.model.vocabulary) if self.model.vocabulary else BYTES
        self.due_at, self.account = due_at, account
        self._digest = self.weights[MODEL_KINDS.index(kind)]
        self.journal = Journal(self.vocabulary)
        self._space = account.context.space  # of its text in the hosts' prefix caches; empty: none
        self.tries = Tries(
            journal=self.journal,
            kind=kind,
            is_batch=account.context.batch,
            capacity=capacity,
            due_at=due_at,
            patience_s=self.ring.settings.hop_timeout_s,
            gives_up_at=partial(self.ring.gives_up_at, most_s=account.context.return_s),
            hedging=self.ring.hedging,
            suspects=self.ring.suspects,
            choose=self._choose,
            may_replay=self.ring.may_replay,
            problem=lambda: problem_of(self.ring.links, self.weights),
        )
        # Called with each picture preview as soon as it arrives.
        self.on_preview: Callable[[stage_pb2.Event], object] = lambda event: None
        self.on_event: Callable[[], object] = lambda: None  # called when an event is ready to read
        self._inbox = deque[tuple[Attempt, stage_pb2.Event]]()
        # Hosts that contributed to delivered results, and the last path.
        self._helpers = set[HostLink]()
        self._path: HostPath = ()
        # Work and results so far, kept for an audit.
        self._works, self._results = list[Work | PictureMessage](), list[stage_pb2.Event]()
        self._begun_at = self.ring.clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._give_up(list(self.tries.attempts))
        if (answer := self._audited()) is not None:  # it ended early, but its text was handed out and is still audited
            self.account.audits.append(self.ring.spawn(self.ring.auditor.audit(answer)))

    async def finish(self) -> None:
        """Audit the answer, if it is picked, before its end is handed out. Raises AuditFailed."""
        if (answer := self._audited()) is not None and not await self.ring.auditor.audit(answer):
            raise AuditFailed("an answer was wrong")

    async def push(self, work: Work | PictureMessage, text: bytes = b"", drafts: bytes = b"") -> None:
        """Run the steps of `pushing`."""
        await self.ring.take(self, self.pushing(work, text, drafts))

    async def event(self, check: Check | None = None) -> stage_pb2.Event:
        """Run the steps of `result`."""
        return await self.ring.take(self, self.result(check))

    def pushing(self, work: Work | PictureMessage, text: bytes = b"", drafts: bytes = b"") -> Steps[None]:
        """Start a sweep, or the first of some AR steps: number it, and add the text that hosts have not read.
        Raises StatusError if no hosts are available.

        :param text: all of it that is known.
        :param drafts: draft tokens after it."""
        self.journal.begin(work, text, drafts)
        self.tries.work_begins(self.ring.clock())
        if self.ring.auditor.share:
            self._works.append(work)
        if attempts := self.tries.attempts:
            attempts[0].send(self._hops(attempts[0], work))
        else:
            yield from self._try()

    def result(self, check: Check | None = None) -> Steps[stage_pb2.Event]:
        """The next result. Raises StatusError when no hosts can produce it, or at the deadline."""
        while True:
            if not self._inbox:
                yield Wait(self.tries.wait_s(self.ring.clock()), until_event=True)
            if not self._inbox:
                if (path := self.tries.hedge_path(self.ring.clock())) is not None:
                    self._begin(path)
                continue
            attempt, event = self._inbox.popleft()
            attempt.unread -= 1
            if attempt not in self.tries.attempts:
                continue  # that try was given up, or another was faster
            if event.WhichOneof("outcome") == "fault":
                yield from self._fail(attempt, event.fault)
                continue
            if event.pictures.preview:
                if event.number == self.journal.work.number:
                    self.on_preview(event)
                continue
            try:
                if (whole := self.tries.whole(attempt, event, self.ring.clock())) is None:
                    continue
                if check is not None:
                    check(whole)
            except StatusError as refusal:
                host = attempt.path[-1].entry.name
                yield from self._fail(attempt, stage_pb2.Fault(code=refusal.number, message=refusal.message, host=host))
                continue
            for link in self._helpers:
                if link.quarantined:
                    raise AuditFailed(f"host {link.entry.name} is faulty")
            self.ring.auditor.counters.sweeps += 1
            if self.ring.auditor.share:
                self._results.append(whole)
            self._settle(attempt, whole)
            return whole

    def _receive(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        if (accepted := self.tries.accept(attempt, event)) is not None:
            self._inbox.append((attempt, accepted))
            self.on_event()

    def _settle(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        self._give_up([each for each in self.tries.attempts if each is not attempt])
        self.account.batches = max(self.account.batches, attempt.results)
        if attempt.recalled:
            self.account.cached_tokens, attempt.recalled = attempt.recalled, 0
        if attempt.path is not self._path:
            self._path = attempt.path
            self._helpers.update(attempt.path)
            self.account.hosts = {link.info.name: link for link in attempt.path if link.info}
        for timing in event.timings:
            if timing.host in self.account.hosts:
                self.account.hosts[timing.host].record(timing)
        if self.journal.settle(event):
            self.tries.work_begins(self.ring.clock())

    def _fail(self, attempt: Attempt, fault: stage_pb2.Fault) -> Steps[None]:
        """End an attempt; if it was the last, begin another. Raises StatusError if that is no use."""
        self.ring.end(attempt)
        if (pause_s := self.tries.failed(attempt, fault, self.ring.clock())) is None:
            return
        if pause_s:
            yield Wait(pause_s, until_event=False)
        yield from self._try()

    def _try(self) -> Steps[None]:
        """Begin an attempt once hosts are available. Raises StatusError if that takes too long."""
        since_s, prefixes = self.ring.clock(), list[bytes]()
        work, text = self.journal.work, self.journal.text
        # after a failure hosts read the whole text again: the second try must not rely on a cache that may be gone too
        anew = self.tries.count or self.tries.forgotten or self.journal.start
        # the last known token is always read: the hosts must predict the next one
        most = (self.vocabulary.count(text) - 1) // ATTEND_POSITIONS * ATTEND_POSITIONS
        if self._space and most > 0 and not anew and isinstance(work, stage_pb2.Read):
            root = prefix_root(self._space, self._digest, work.codec)
            prefixes = prefix_digests(root, self.vocabulary.cut(text, 0, most), self.vocabulary)
        while (path := self.tries.next_path(prefixes, since_s, self.ring.clock())) is None:
            yield Wait(PAUSE_S, until_event=False)
        self._begin(path, prefixes)

    def _choose(self, avoid: Collection[str] = (), prefixes: Sequence[bytes] = ()) -> HostPath | None:
        return self.ring.choose(self.weights, [*avoid, *self.ring.auditor.to_avoid()], prefixes)

    def _begin(self, path: HostPath, prefixes: Sequence[bytes] = ()) -> None:
        """:param prefixes: of the text, which the hosts may have cached."""
        self.account.replays += self.tries.count > 0
        attempt = self.ring.begin(path, self._receive)
        self.tries.begun(attempt, self.ring.clock())
        work, memory = self.journal.replay(), None
        long = self.vocabulary.count(self.journal.text) >= ATTEND_POSITIONS
        if self._space and isinstance(work, stage_pb2.Read) and long:
            kept = cached_by(path, prefixes) if prefixes else 0
            memory = attempt.memory(self._space, prefixes[kept - 1] if prefixes and kept else b"")
            if memory is not None and kept:
                attempt.recalled = kept * ATTEND_POSITIONS
                work = after_prefix(work, attempt.recalled, self.vocabulary)
        attempt.send(self._hops(attempt, work, memory))

    def _hops(
        self, attempt: Attempt, work: Work | PictureMessage, memory: stage_pb2.Memory | None = None
    ) -> list[stage_pb2.Hop]:
        hop = stage_pb2.Hop(
            router=self.ring.name,
            session=attempt.name,
            left_s=max(self.due_at - self.ring.clock(), 0.0),
            digest=self._digest,
            capacity=self.capacity,
            path=[link.entry.address for link in attempt.path],
            memory=memory,
        )
        put_work(hop, work)
        self.account.context.stamp(hop)
        # cut here, not by the hosts: each chunk is a normal hop, checked, queued, refused and resent on its own
        return step_hops(hop, self.vocabulary, batch_rows(self.model.width or 1))

    def _audited(self) -> AuditedAnswer | None:
        """The answer since the last call, if it is picked for an audit."""
        works, results, self._works, self._results = self._works, self._results, [], []
        if not results:
            return None
        answer = AuditedAnswer(
            hosts=frozenset(self._helpers),
            path=self._path,
            works=works,
            results=results,
            vocabulary=self.vocabulary,
            hops=self._hops,
            choose=partial(self.ring.choose, self.weights),
            due_at=self.due_at,
            took_s=self.ring.clock() - self._begun_at,
        )
        return answer if self.ring.auditor.picks(answer) else None

    def _give_up(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self.tries.attempts.remove(attempt)
            self.ring.end(attempt)
