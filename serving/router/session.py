"""One request's place on the hosts: work goes out, results come back, and what fails is done again elsewhere.

Hosts that die, freeze, are cut off or answer nonsense cost a request time, never its text: the session knows the text
and in which pieces it was read, and any other hosts with the same blocks go on from there to the same bytes. The
tokens of AR steps give the same in any pieces. What a sweep or a score reads does not: caches of the same tokens read
in other pieces differ in the last bits, and a near tie could fall otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import grpc

from serving.router.accounting import JITTER_S, Account
from serving.router.answer import AuditedAnswer
from serving.router.audit import AuditFailed
from serving.router.host_link import Attempt, HostLink, HostPath
from serving.router.journal import Journal
from serving.router.paths import kept_by
from serving.router.ring import RingView
from stages.clock import monotonic
from stages.host.parts import MODEL_KINDS, ModelKind
from stages.host.schema_check import NOT_FOLLOWED
from stages.host.validation import check_timings
from stages.model.prefill import ATTEND_POSITIONS, MAX_PREFILL_CHUNKS, prefix_digests, prefix_root
from stages.model.scoring import batch_rows
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import PictureMessage, Work, after_prefix, merged, put_work, seconds_until, step_hops
from stages.wire.status import StatusError, deadline_exceeded, internal, invalid, unavailable

# Raises StatusError for a result that cannot be one.
Check = Callable[[stage_pb2.Event], object]

_Code = grpc.StatusCode
# Faults of a host's state: other hosts may do the work, or the same one in a moment. All others are nonsense, which a
# sound host does not say: the router checked the request, and keeps its deadline.
ELSEWHERE = {_Code.UNAVAILABLE, _Code.NOT_FOUND, _Code.FAILED_PRECONDITION, _Code.CANCELLED, _Code.RESOURCE_EXHAUSTED}
# Faults that a client would take for its own.
OF_THE_ROUTER = {_Code.UNAUTHENTICATED, _Code.PERMISSION_DENIED, _Code.DEADLINE_EXCEEDED}
NONSENSE_TRIES = 3
# Beyond one for each position of a session: nobody sound sends as many that are not waited for.
MOST_EVENTS_BEYOND = 8
PAUSE_S = 0.05
MOST_PAUSE_S = 0.5


class Session:
    """One request's place on the hosts, to be used in a `with` block, at whose end it is freed on every host.

    It owns the request's text and numbers, the choice of a second try and what is done again elsewhere. Of the ring it
    asks a way through the hosts; its work and results go over the links of that way.
    """

    def __init__(self, view: RingView, kind: ModelKind, capacity: int, due_at: float, account: Account) -> None:
        """:param view: the hosts and the weights that every try uses: a text comes from one set.
        :param capacity: positions that the hosts keep room for.
        :param due_at: the deadline, by the monotonic clock."""
        self.ring, self.kind, self.weights, self.capacity = view.ring, kind, view.weights, capacity
        self.model = view.model(kind) or stage_pb2.ModelInfo()
        self.vocabulary = Vocabulary(self.model.vocabulary) if self.model.vocabulary else BYTES
        # cut here and not by the hosts: a piece is a hop like others, checked, queued, refused and resent as one
        rows = batch_rows(self.model.width or 1)
        self._cut = partial(step_hops, vocabulary=self.vocabulary, most=MAX_PREFILL_CHUNKS, rows=rows)
        self.due_at, self.account = due_at, account
        self._choose = partial(view.ring.choose, self.weights)
        self.attempts: list[Attempt] = []
        self._digest = self.weights[MODEL_KINDS.index(kind)]
        self.journal = Journal(self.vocabulary)
        self._space = account.context.space  # of its text in the hosts' memory; empty: it has none
        self._forgotten = False  # a host no longer had what it said that it keeps
        # Called with an event that shows how far pictures are, as soon as it comes.
        self.on_preview: Callable[[stage_pb2.Event], object] = lambda event: None
        self._inbox: asyncio.Queue[tuple[Attempt, stage_pb2.Event]] = asyncio.Queue()
        self._blamed = set[str]()  # addresses of hosts that failed this session
        self._failed_on = dict[HostPath, float]()  # paths on which the work under way failed, and when
        self._tries = self._nonsense = 0  # of the work under way; and those that ended in nonsense
        self._waiting_since = self._tried_at = 0.0
        # Hosts that had a part in what was delivered, on which path last.
        self._helpers = set[HostLink]()
        self._path: HostPath = ()
        # Work and results so far, for an audit.
        self._works, self._results = list[Work | PictureMessage](), list[stage_pb2.Event]()
        self._begun_at = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for attempt in list(self.attempts):
            self._give_up(attempt)
        if (answer := self._audited()) is not None:  # it ended early: what was handed out is checked all the same
            self.account.audits.append(self.ring.spawn(self.ring.auditor.audit(answer)))

    async def finish(self) -> None:
        """Have the answer audited, if it is one of those, before its end is handed out. Raises AuditFailed."""
        if (answer := self._audited()) is not None and not await self.ring.auditor.audit(answer):
            raise AuditFailed("an answer was wrong")

    async def push(self, work: Work | PictureMessage, text: bytes = b"", drafts: bytes = b"") -> None:
        """Start a sweep, or the first of some AR steps: it gets its number, and what hosts have not read of the text.
        Raises StatusError where there are no hosts for it.

        :param text: all that is known of it.
        :param drafts: tokens after it that may be wrong."""
        self.journal.begin(work, text, drafts)
        self._failed_on, self._tries, self._nonsense, self._waiting_since = {}, 0, 0, monotonic()
        if self.ring.auditor.share:
            self._works.append(work)
        if self.attempts:
            self.attempts[0].send(self._hops(self.attempts[0], work))
        else:
            await self._try()

    def keep(self, drafts: int) -> None:
        """The hosts keep so many of the drafts of the last work."""
        self.journal.kept = drafts

    async def event(self, check: Check | None = None) -> stage_pb2.Event:
        """The next result. Raises StatusError when no hosts get it done, or at the deadline."""
        while True:
            if (found := await self._next()) is None:
                self._hedge()
                continue
            attempt, event = found
            attempt.unread -= 1
            if attempt not in self.attempts:
                continue  # it was given up, or another was faster
            if event.WhichOneof("outcome") == "fault":
                await self._fail(attempt, event.fault)
                continue
            if event.pictures.preview:
                if event.number == self.journal.work.number:
                    self.on_preview(event)
                continue
            try:
                if (whole := self._whole(attempt, event)) is None:
                    continue
                if check is not None:
                    check(whole)
            except StatusError as refusal:
                last = attempt.path[-1].entry
                fault = stage_pb2.Fault(code=refusal.number, message=refusal.message, host=last.name)
                await self._fail(attempt, fault)
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
        """Take a result or fault in; an attempt whose hosts send results without end has failed."""
        most = self.capacity + attempt.results + MOST_EVENTS_BEYOND
        if attempt.unread > most:
            return
        if attempt.unread == most:
            fault = stage_pb2.Fault(code=_Code.INTERNAL.value[0], message="the hosts sent results without end")
            event = stage_pb2.Event(session=attempt.name, fault=fault)
        attempt.unread += 1
        attempt.replays &= event.WhichOneof("outcome") == "fault"
        self._inbox.put_nowait((attempt, event))

    def _whole(self, attempt: Attempt, event: stage_pb2.Event) -> stage_pb2.Event | None:
        """The result that ends with `event`; None where batches of it are lacking, or it was sent twice. Raises
        StatusError."""
        due = self.journal.due, len(attempt.batches)
        came = event.number, event.scores.batch if event.HasField("scores") else due[1]
        if came < due:
            return None
        if came > due:
            raise internal(f"the result of {came[0]}, batch {came[1]}, came for {due[0]}, batch {due[1]}")
        check_timings(event.timings)
        # also where there was a second try: else what takes long would be tried twice for ever
        if not self._failed_on and attempt is self.attempts[0]:
            self.ring.hedging.record(self._pace, monotonic() - self._waiting_since)
            self._waiting_since = monotonic()
        attempt.batches.append(event)
        if len(attempt.batches) < attempt.results:
            return None
        whole, attempt.batches = merged(attempt.batches), []
        return whole

    def _settle(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        while len(self.attempts) > 1:
            self._give_up(self.attempts[0] if self.attempts[0] is not attempt else self.attempts[1])
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
            self._failed_on, self._tries, self._nonsense, self._waiting_since = {}, 0, 0, monotonic()

    async def _next(self) -> tuple[Attempt, stage_pb2.Event] | None:
        """The next event; None when it is time for a second try."""
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        left_s, waited_s = self.due_at - monotonic(), monotonic() - max(self._waiting_since, self._tried_at)
        if len(self.attempts) < 2:  # else there is a second try already
            left_s = min(self.ring.hedging.wait_s(self._pace, left_s) - waited_s, left_s)
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                return await self._inbox.get()
        except TimeoutError:
            if monotonic() < self.due_at:
                return None
            raise deadline_exceeded("the deadline passed before the hosts sent a result") from None

    def _hedge(self) -> None:
        """Overtake a slow try by a second one, on other hosts where that can be."""
        self._tried_at = monotonic()
        current = {link.entry.address for attempt in self.attempts for link in attempt.path}
        path = self._choose(self._blamed | self.ring.auditor.apart() | current)
        if path and not any(path == attempt.path for attempt in self.attempts) and self.ring.hedging.may_hedge():
            self._tries += 1  # only here: what takes long, and has no other way, has not failed
            self._begin(path)

    async def _fail(self, attempt: Attempt, fault: stage_pb2.Fault) -> None:
        """End an attempt; if it was the last one, begin another. Raises StatusError where that is no use."""
        self._give_up(attempt)
        if attempt.recalled and fault.code == _Code.NOT_FOUND.value[0]:
            # a host no longer had in memory what it had listed: that is no reason to avoid it
            self._forgotten = True
            for link in attempt.path:
                link.forget_prefixes()
            if not self.attempts:
                await self._try()
            return
        work = self.journal.work
        has_schema = isinstance(work, stage_pb2.Read) and work.sample.sampling.HasField("grammar")
        if has_schema and fault.message.startswith(NOT_FOLLOWED):
            raise invalid(fault.message)  # of schema and text alone: other hosts would say the same
        self._blame(attempt, fault)
        if self.attempts:
            return
        source = f"{fault.host}: " if fault.host else ""
        refusal = StatusError.numbered(fault.code, source + fault.message)
        late = refusal.code is _Code.DEADLINE_EXCEEDED and monotonic() >= self.due_at - JITTER_S
        if refusal.code in OF_THE_ROUTER and not late:
            refusal = internal(refusal.message)
        self._tries += 1
        self._failed_on.setdefault(attempt.path, monotonic())
        patient = monotonic() < min(self._failed_on.values()) + self.ring.settings.hop_timeout_s
        self._nonsense += refusal.code not in ELSEWHERE
        if late or (refusal.code not in ELSEWHERE and self._nonsense >= NONSENSE_TRIES):
            raise refusal
        if not patient or refusal.code is _Code.RESOURCE_EXHAUSTED:
            # that nobody takes a hop is noticed when patience is over: a way that was not tried is tried all the same
            path = self._choose(self._blamed | self.ring.auditor.apart())
            if path is None or path in ([attempt.path] if patient else self._failed_on):
                raise refusal
        if self._tries > 1:
            await asyncio.sleep(min(PAUSE_S * 2**self._tries, MOST_PAUSE_S))
        await self._try(refusal)

    async def _try(self, because: StatusError | None = None) -> None:
        """Begin an attempt, once there are hosts for it. Raises StatusError when there are none for too long."""
        left_s = self.due_at - monotonic()
        patience_s = min(self.ring.settings.hop_timeout_s, left_s)
        deadline, prefixes = monotonic() + patience_s, list[bytes]()
        work, text = self.journal.work, self.journal.text
        # once something went wrong, hosts read all of it anew: the second try depends on nothing that may be gone, too
        anew = self._tries or self._forgotten or self.journal.start
        # the last known token is read in any case: the hosts are asked for what follows it
        most = (self.vocabulary.count(text) - 1) // ATTEND_POSITIONS * ATTEND_POSITIONS
        if self._space and most > 0 and not anew and isinstance(work, stage_pb2.Read):
            root = prefix_root(self._space, self._digest, work.codec)
            prefixes = prefix_digests(root, self.vocabulary.cut(text, 0, most), self.vocabulary)
        avoid = self._blamed | self.ring.auditor.apart()
        while (path := self._choose(avoid, prefixes)) is None or (self._tries and not self.ring.may_replay()):
            if monotonic() > (self.due_at if path else deadline):
                problem = because.message if because else self.ring.problem_of(self.weights)
                raise unavailable(f"{problem} (waited {patience_s:.1f} s)")
            await asyncio.sleep(PAUSE_S)
        self._begin(path, prefixes)

    def _begin(self, path: HostPath, prefixes: Sequence[bytes] = ()) -> None:
        """:param prefixes: of the text, which the hosts may have in memory."""
        self._tried_at = monotonic()
        self.account.replays += self._tries > 0
        attempt = self.ring.begin(path, self._receive)
        attempt.replays = self._tries > 0
        self.attempts.append(attempt)
        work, memory = self.journal.replay(), None
        long = self.vocabulary.count(self.journal.text) >= ATTEND_POSITIONS
        if self._space and isinstance(work, stage_pb2.Read) and long:
            kept = kept_by(path, prefixes) if prefixes else 0
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
            left_s=seconds_until(self.due_at),
            digest=self._digest,
            capacity=self.capacity,
            path=[link.entry.address for link in attempt.path],
            memory=memory,
        )
        put_work(hop, work)
        self.account.context.stamp(hop)
        return self._cut(hop)

    def _audited(self) -> AuditedAnswer | None:
        """The answer since the last call, if it is to be audited."""
        works, results, self._works, self._results = self._works, self._results, [], []
        if not results:
            return None
        took_s = monotonic() - self._begun_at
        answer = AuditedAnswer(
            *(frozenset(self._helpers), self._path, works, results, self.vocabulary, self._hops),
            *(self._choose, self.due_at, took_s),
        )
        return answer if self.ring.auditor.picks(answer) else None

    def _give_up(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        self.ring.end(attempt)

    def _blame(self, attempt: Attempt, fault: stage_pb2.Fault) -> None:
        """Remember the hosts to avoid: the one that did not take the work, else the one that reported the fault."""
        names = [(link.entry.name, link) for link in attempt.path]
        names += [(link.info.name, link) for link in attempt.path if link.info]  # what it calls itself
        source = next((link.entry.address for name, link in names if name == fault.host), "")
        guilty = fault.lost or source
        if fault.lost and source:
            self.ring.suspects.add(source, fault.lost, monotonic())
        if StatusError.numbered(fault.code, fault.message).code not in ELSEWHERE:
            # the sender of nonsense cannot be identified, so every host on the path is suspected
            self._blamed.update(link.entry.address for link in attempt.path)
        elif guilty:
            self._blamed.add(guilty)

    @property
    def _pace(self) -> str:
        """Kind of the work under way, for its usual time: the first batch of candidates has all hosts to pass."""
        work = self.journal.work
        if isinstance(work, PictureMessage):
            drawing = work.drawing  # what takes twice as long has a usual time of its own
            size = (len(drawing.classes) * drawing.levels).bit_length()
            return f"pictures by {self.kind}, 2^{size}"
        later = " more" if self.attempts and self.attempts[0].batches else ""
        scores = isinstance(work, stage_pb2.Read) and work.HasField("score")
        kind = f"{self.kind}{later} candidates" if scores else self.kind
        return f"{kind}, batch" if self.account.context.batch else kind
