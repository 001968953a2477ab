"""One request's place on the hosts: work goes out, results come back, and what fails is done again elsewhere.

Hosts that die, freeze, are cut off or answer nonsense cost a request time, never its text: the journal says what was
read, and any other hosts with the same blocks go on from there to the same bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Self

import grpc

from onesweep.serving.router import records as ticket
from onesweep.serving.router.accounting import Account
from onesweep.serving.router.audit import AuditedSweep
from onesweep.serving.router.paths import Attempt, HostLink, HostPath, places_of
from onesweep.serving.router.ring import RingView
from onesweep.stages.host.parts import MODEL_KINDS, ModelKind
from onesweep.stages.host.validation import check_timings
from onesweep.stages.model.scoring import batch_rows, most_scored
from onesweep.stages.model.vocabulary import BYTES, Alphabet
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.messages import PictureWork, Work, copy_of, draft_of, merged, put_work, results_of, step_hops
from onesweep.stages.wire.status import StatusError, internal, unavailable

if TYPE_CHECKING:
    from onesweep.serving.modes.base import Generation, Mode


# The journal of a session's reads: with it, other hosts can take over where they stopped.

# An AR step's symbols are read as if they came one by one up to so many at once (FEW_POSITIONS in stages/backends).
READ_BYTES = 64


class Journal:
    """Symbols read before the work under way, and in which pieces: rounding depends on them, a text may not."""

    def __init__(self, alphabet: Alphabet = BYTES) -> None:
        self.alphabet = alphabet
        self.text = b""
        self.reads: list[int] = []

    def replay(self, work: Work) -> Work:
        """`work` for hosts that have read nothing yet."""
        if not self.text:
            return work
        clean = self.text + work.clean
        again = copy_of(work)
        again.start, again.clean = 0, clean
        # caches of the same bytes read in other pieces differ in the last bits, and a near tie could fall otherwise
        again.reads[:] = self.reads if isinstance(work, stage_pb2.Sweep | stage_pb2.Score) else self._merged()
        return again

    def add(self, work: Work, start: int) -> None:
        """Book what `work` had the hosts read, once the next work begins at `start`: guesses beyond are forgotten."""
        count = self.alphabet.count
        clean = self.alphabet.cut(work.clean, 0, start - count(self.text))
        # guesses that came with a prompt were read apart from it (stages/host/work.py)
        drafts = draft_of(work) if not self.text else 0
        first = min(count(clean), count(work.clean) - drafts)
        self.text += clean
        self.reads += [piece for piece in (first, count(clean) - first) if piece]

    def advance(self, step: stage_pb2.Decode, written: bytes) -> stage_pb2.Decode:
        """The step that the hosts are at who went on from `step` alone, a symbol a step, and wrote `written`."""
        read, count = self.alphabet.count(step.clean), self.alphabet.count(written)
        after = copy_of(step)
        after.number += count
        after.start += read + count - 1
        after.clean = self.alphabet.cut(written, count - 1)
        after.remaining -= count
        self.add(step, step.start + read)
        self.text += self.alphabet.cut(written, 0, count - 1)
        return after

    def _merged(self) -> list[int]:
        """The prompt as it came, and what came after it in few pieces."""
        first, rest = self.reads[0], self.alphabet.count(self.text) - self.reads[0]
        return [first, *[READ_BYTES] * (rest // READ_BYTES), *([rest % READ_BYTES] if rest % READ_BYTES else [])]


# Raises Refusal for a result that cannot be one.
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
MOST_TRIES = 3
# Where nobody could be named, another host may be there by then.
RETRY_PAUSE_S = 0.5
PAUSE_S = 0.05
MOST_PAUSE_S = 0.5


class AuditFailed(Exception):
    """A faulty host had a part in this request: all of it must be written again."""


class Session:
    """One request's place on the hosts, to be used in a `with` block, at whose end it is freed on every host.

    It owns the journal of what was read, the choice of a second try and what is done again elsewhere. Of the ring it
    asks a way through the hosts; its work and results go over the links of that way.
    """

    def __init__(
        self, view: RingView, kind: ModelKind, capacity: int, deadline_unix_ms: int, account: Account, first: int = 0
    ) -> None:
        """:param view: the hosts and the weights that every try uses: a text comes from one set.
        :param capacity: positions that the hosts keep room for.
        :param first: part of the model whose host gets the work first."""
        model = view.model(kind)
        self.ring, self.kind, self.weights, self.capacity = view.ring, kind, view.weights, capacity
        self.model = model or stage_pb2.ModelInfo()
        self.alphabet = Alphabet(self.model.vocabulary) if self.model.vocabulary else BYTES
        # cut here and not by the hosts: a piece is a hop like others, checked, queued, refused and resent as one
        rows = batch_rows if view.settings.pieces > 1 else most_scored
        self._cut = partial(
            step_hops, alphabet=self.alphabet, most=view.settings.pieces, rows=rows(model.width if model else 1)
        )
        self.deadline_unix_ms, self.account = deadline_unix_ms, account
        self._choose = partial(view.ring.choose, self.weights, first_part=first)
        self.attempts: list[Attempt] = []
        self._digest = self.weights[MODEL_KINDS.index(kind)]
        self._journal = Journal(self.alphabet)
        self._work: Work | PictureWork | None = None
        # Called with an event that shows how far pictures are, as soon as it comes.
        self.on_preview: Callable[[stage_pb2.Event], object] = lambda event: None
        # Symbols that the hosts generated by themselves since `_work` was pushed.
        self._written = b""
        self._inbox: asyncio.Queue[tuple[Attempt, stage_pb2.Event]] = asyncio.Queue()
        # Addresses of hosts that failed this session.
        self._blamed: set[str] = set()
        # When the work under way began to fail.
        self._failed_at: float | None = None
        self._tries = 0
        self._waiting_since = 0.0
        # Hosts that had a part in what was delivered.
        self._helpers = set[HostLink]()
        self._audit_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for attempt in list(self.attempts):
            self._give_up(attempt)

    async def push(self, work: Work | PictureWork) -> None:
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
            if event.pictures.preview:
                if event.number == self._work.number:
                    self.on_preview(event)
                continue
            due = self._due_number, len(attempt.batches)
            came = event.number, event.scores.batch if event.HasField("scores") else due[1]
            if came < due:
                continue  # of a hop that was sent twice
            try:
                if came > due:
                    raise internal(f"the result of {came[0]}, batch {came[1]}, came for {due[0]}, batch {due[1]}")
                check_timings(event.timings)
                self._learn(attempt)
                attempt.batches.append(event)
                if len(attempt.batches) < attempt.results:
                    continue
                event, attempt.batches = merged(attempt.batches), []
                if check is not None:
                    check(event)
            except StatusError as refusal:
                last = attempt.path[-1].entry
                fault = stage_pb2.Fault(code=refusal.number, message=refusal.message, host=last.name)
                await self._fail(attempt, fault)
                continue
            # of all the steps of an undivided net, and of experts, the router sees the last result only
            if not isinstance(self._work, stage_pb2.Denoise | stage_pb2.Consult) and self.ring.auditor.picks():
                await self._audit(attempt, event)
            for link in self._helpers:
                if link.quarantined:
                    raise AuditFailed(f"host {link.entry.name} is faulty")
            if self._audit_failed:
                raise AuditFailed("a sweep was wrong")
            self._settle(attempt, event)
            ticket.arrived()
            return event

    def _receive(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        """Take a result or fault in; an attempt whose hosts send results without end has failed."""
        most = self.capacity + attempt.results + MOST_EVENTS_BEYOND
        if attempt.unread > most:
            return
        if attempt.unread == most:
            fault = stage_pb2.Fault(code=_Code.INTERNAL.value[0], message="the hosts sent results without end")
            event = stage_pb2.Event(session=attempt.name, fault=fault)
        attempt.unread += 1
        self._inbox.put_nowait((attempt, event))

    @property
    def _due_number(self) -> int:
        """Number of the next result."""
        if isinstance(self._work, stage_pb2.Denoise):  # the hosts make all steps before they send one
            return self._work.number + self._work.drawing.levels - self._work.level
        assert self._work is not None
        return self._work.number + self.alphabet.count(self._written)

    def _go_on(self, work: Work | PictureWork) -> None:
        """Make `work` the work under way, after what came before."""
        if self._work is not None and not isinstance(self._work, PictureWork):
            assert not isinstance(work, PictureWork)
            self._journal.add(self._work, work.start)
        self._work, self._written = work, b""
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        self._failed_at, self._tries = None, 0
        self._waiting_since = time.monotonic()

    def _learn(self, attempt: Attempt) -> None:
        """Book how long a result, or a batch of it, was waited for; the next batch has a time of its own."""
        # also where there was a second try: else what takes long would be tried twice for ever
        if self._failed_at is None and attempt is self.attempts[0]:
            self.ring.hedging.learn(self._pace, time.monotonic() - self._waiting_since)
            self._waiting_since = time.monotonic()

    def _settle(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        """A result is here: other attempts can stop."""
        for other in [other for other in self.attempts if other is not attempt]:
            self._give_up(other)
        self.account.batches = max(self.account.batches, attempt.results)
        self._helpers.update(attempt.path)
        hosts = {link.info.name: link for link in attempt.path if link.info}
        self.account.hosts = {name: link.entry for name, link in hosts.items()}
        for timing in event.timings:
            if timing.host in hosts:
                hosts[timing.host].learn(timing)
        assert self._work is not None
        if isinstance(self._work, stage_pb2.Decode) and self._work.remaining > 1:
            self._written += event.text
            self._begin_waiting()

    async def _next(self) -> tuple[Attempt, stage_pb2.Event] | None:
        """The next event; None when it is time for a second try."""
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        left_s = self.deadline_unix_ms / 1000 - time.time()
        waited_s = time.monotonic() - self._waiting_since
        patient = len(self.attempts) > 1 or self._tries > 0
        wait_s = left_s if patient else min(self.ring.hedging.wait_s(self._pace, left_s) - waited_s, left_s)
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                return await self._inbox.get()
        except TimeoutError:
            if time.time() * 1000 < self.deadline_unix_ms:
                return None
            message = "the deadline passed before the hosts sent a result"
            raise StatusError(_Code.DEADLINE_EXCEEDED, message) from None

    def _hedge(self) -> None:
        """Overtake a slow try by a second one, on other hosts where that can be."""
        self._tries += 1
        current = {link.entry.address for attempt in self.attempts for link in attempt.path}
        path = self._choose(avoid=self._blamed | current)
        if path and not any(path == attempt.path for attempt in self.attempts) and self.ring.hedging.may_hedge():
            self._begin(path)

    async def _fail(self, attempt: Attempt, fault: stage_pb2.Fault) -> None:
        """End an attempt; if it was the last one, begin another. Raises Refusal where that is no use."""
        self._give_up(attempt)
        self._blame(attempt, fault)
        if self.attempts:
            return
        source = f"{fault.host}: " if fault.host else ""
        refusal = StatusError.numbered(fault.code, source + fault.message)
        is_over = time.time() * 1000 >= self.deadline_unix_ms - ticket.JITTER_MS
        late = is_over and refusal.code is _Code.DEADLINE_EXCEEDED
        if refusal.code in OF_THE_ROUTER and not late:
            refusal = internal(refusal.message)
        self._tries += 1
        self._failed_at = self._failed_at or time.monotonic()
        patience_s = self.ring.settings.hop_timeout_s - (time.monotonic() - self._failed_at)
        nonsense = refusal.code not in ELSEWHERE
        if late or patience_s <= 0 or (nonsense and self._tries >= NONSENSE_TRIES):
            raise refusal
        if refusal.code is _Code.RESOURCE_EXHAUSTED:
            path = self._choose(avoid=self._blamed)
            if path is None or path == attempt.path:
                raise refusal
        if self._tries > 1:
            await asyncio.sleep(min(PAUSE_S * 2**self._tries, MOST_PAUSE_S))
        await self._try(refusal)

    async def _try(self, because: StatusError | None = None) -> None:
        """Begin an attempt, once there are hosts for it. Raises Refusal when there are none for too long."""
        left_s = self.deadline_unix_ms / 1000 - time.time()
        patience_s = min(self.ring.settings.hop_timeout_s, left_s)
        deadline = time.monotonic() + patience_s
        while (path := self._choose(avoid=self._blamed)) is None:
            if time.monotonic() > deadline:
                problem = because.message if because else self.ring.problem_of(self.weights)
                raise unavailable(f"{problem} (waited {patience_s:.1f} s)")
            await asyncio.sleep(PAUSE_S)
        self._begin(path)

    def _begin(self, path: HostPath) -> None:
        if self._tries:
            self.account.replays += 1
        attempt = self.ring.begin(path, self._receive)
        self.attempts.append(attempt)
        self._catch_up()
        self._send(attempt, self._replay())

    def _replay(self) -> Work | PictureWork:
        """The work under way for hosts that have read nothing yet. Of pictures hosts keep nothing: it is the same."""
        assert self._work is not None
        return self._work if isinstance(self._work, PictureWork) else self._journal.replay(self._work)

    def _catch_up(self) -> None:
        """Make the step that the hosts are at by themselves the work under way."""
        if self._written:
            assert isinstance(self._work, stage_pb2.Decode)
            self._work, self._written = self._journal.advance(self._work, self._written), b""

    def _send(self, attempt: Attempt, work: Work | PictureWork) -> None:
        hop = self._hop(attempt, work)
        ticket.stamp(hop)
        hops = self._cut(hop)
        attempt.results, attempt.batches = results_of(hops), []
        attempt.send(hops)

    def _hop(self, attempt: Attempt, work: Work | PictureWork) -> stage_pb2.Hop:
        hop = stage_pb2.Hop(
            router=self.ring.name,
            session=attempt.name,
            deadline_unix_ms=self.deadline_unix_ms,
            digest=self._digest,
            capacity=self.capacity,
            path=[link.entry.address for link in attempt.path],
        )
        put_work(hop, work)
        if isinstance(work, stage_pb2.Consult):
            hop.consult.places.extend(places_of(attempt.path))
        return hop

    async def _audit(self, attempt: Attempt, event: stage_pb2.Event) -> None:
        self._catch_up()
        opening = self._hop(attempt, self._replay())
        if opening.WhichOneof("work") == "decode":
            opening.decode.remaining = 1
        elif opening.WhichOneof("work") == "draw":
            opening.draw.previews = False  # an audit waits for the result alone
        self._helpers.update(attempt.path)
        hops = self._cut(opening)
        sweep = AuditedSweep(attempt.path, self.weights, hops, event, self.model)
        if not await self.ring.auditor.audit(sweep):
            self._audit_failed = True

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
            self.ring.suspects.add(source, fault.lost)
        if StatusError.numbered(fault.code, fault.message).code not in ELSEWHERE:
            # the sender of nonsense cannot be identified, so every host on the path is suspected
            self._blamed.update(link.entry.address for link in attempt.path)
        elif guilty:
            self._blamed.add(guilty)

    @property
    def _pace(self) -> str:
        """Kind of the work under way, for its usual time: the first batch of candidates has all hosts to pass."""
        if isinstance(self._work, PictureWork):
            drawing = self._work.drawing  # what takes twice as long has a usual time of its own
            size = (len(drawing.classes) * drawing.levels).bit_length()
            return f"pictures by {self.kind}, 2^{size}, {ticket.link_ms()} ms more a hop"
        later = " more" if self.attempts and self.attempts[0].batches else ""
        kind = f"{self.kind}{later} candidates" if isinstance(self._work, stage_pb2.Score) else self.kind
        return f"{kind}, {ms} ms more a hop" if (ms := ticket.link_ms()) else kind


async def retry_after_audit(mode: Mode, generation: Generation, account: Account) -> AsyncGenerator[bytes, None]:
    """Pieces of `mode`'s text for `generation`, none of it from hosts that were found to lie meanwhile.

    Raises Refusal: DATA_LOSS where what was handed out already was wrong.
    """
    sent = b""
    for _ in range(MOST_TRIES):
        written = b""
        try:
            async with aclosing(mode.generate(generation, account)) as pieces:
                async for piece in pieces:
                    written += piece
                    if not (written.startswith(sent) or sent.startswith(written)):
                        raise StatusError(
                            grpc.StatusCode.DATA_LOSS,
                            "a host was faulty, and the text so far was wrong: send the request again",
                        )
                    if len(written) > len(sent):
                        fresh, sent = written[len(sent) :], written
                        yield fresh
            return
        except AuditFailed:
            account.begin_again()
            await asyncio.sleep(RETRY_PAUSE_S)
    raise unavailable(f"{MOST_TRIES} times a host of this request was faulty: look at the hosts")
