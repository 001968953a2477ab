"""The decisions of one request: the text that its hosts have read, in which pieces, and when to try again or give up.

Any other hosts with the same weights continue from there to the same bytes. Nothing here uses a network or a clock: the
session passes the events and the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.router.accounting import JITTER_S
from serving.router.paths import Hedging, Suspects
from stages.host.schema_check import NOT_FOLLOWED
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import PictureMessage, Work, check_timings, copy_of, merged
from stages.wire.status import Code, StatusError, deadline_exceeded, internal, invalid, unavailable

if TYPE_CHECKING:
    from serving.router.host_link import Attempt, HostPath

# Faults of a host's state: another host may do the work, or the same one a moment later. Any other fault is nonsense
# that no sound host reports, since the router checked the request and watches its deadline.
HOST_STATE_CODES = {Code.UNAVAILABLE, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.CANCELLED, Code.RESOURCE_EXHAUSTED}
IDENTITY_CODES = {Code.UNAUTHENTICATED, Code.PERMISSION_DENIED}  # its certificate or tokens do not fit
# Faults that a client would mistake for its own.
INTERNAL_CODES = {*IDENTITY_CODES, Code.DEADLINE_EXCEEDED}
MAX_INVALID_TRIES = 3
# Unexpected events allowed beyond one per position of a session; no sound host sends more.
MAX_EVENTS_BEYOND = 8
PAUSE_S, MAX_PAUSE_S = 0.05, 0.5


class Journal:
    """The text and the sequence numbers of a request's work. Call `begin` first, and `settle` after each result."""

    work: Work | PictureMessage  # in progress

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        # The text known so far, and draft tokens after it.
        self.text, self._drafts = b"", b""
        # Tokens that hosts read before the current work, the sizes of the pieces, and its accepted draft tokens.
        self.start, self._reads, self.kept = 0, list[int](), 0
        self._number = 0  # of the next piece of work
        # Tokens that the hosts generated on their own since the work began, and the steps that took.
        self._written, self._steps = b"", 0

    def begin(self, work: Work | PictureMessage, text: bytes, drafts: bytes) -> None:
        """Give a sweep, or the first of some AR steps, its number and the text that hosts have not read.

        :param text: all of it that is known.
        :param drafts: draft tokens after it."""
        if not isinstance(work, PictureMessage):
            start = self.vocabulary.count(self.text) + self.kept
            if start > self.start:
                self._reads.append(start - self.start)
            self.text, self._drafts, self.start, self.kept = text, drafts, start, 0
            work.number, work.start, work.clean = self._number, start, self.vocabulary.cut(text, start) + drafts
        self.work, self._written, self._steps = work, b"", 0

    @property
    def due(self) -> int:
        """The number of the next result."""
        if isinstance(self.work, stage_pb2.Denoise):  # the hosts do all steps before they send a result
            return self.work.number + self.work.drawing.levels - self.work.level
        return self.work.number + self._steps

    def settle(self, event: stage_pb2.Event) -> bool:
        """Record a result; True if the hosts start the next step on their own."""
        self._number, work = event.number + 1, self.work
        if not isinstance(work, stage_pb2.Read) or (work.sample.remaining <= 1 and not work.score.remaining):
            return False
        if event.text and work.score.remaining:  # the hosts have read the known text, and start the next step
            known = self.vocabulary.count(self.text + self._written)
            self._reads.append(known - self.start)
            self.start = known
        self._written, self._steps = self._written + event.text, self._steps + 1
        return True

    def replay(self) -> Work | PictureMessage:
        """The current work for hosts that have read nothing yet. Hosts cache nothing of pictures: same work."""
        if isinstance(self.work, PictureMessage):
            return self.work
        again = copy_of(self.work)
        if isinstance(again, stage_pb2.Read) and self._steps:  # from the step that the hosts had reached
            again.number += self._steps
            getattr(again, again.WhichOneof("ask") or "").remaining -= self.vocabulary.count(self._written)
            self.work, self.text = copy_of(again), self.text + self._written
            self._written, self._steps = b"", 0
        again.start, again.clean = 0, self.text + self._drafts
        if isinstance(again, stage_pb2.Sweep) or again.HasField("score"):
            again.reads[:] = self._reads
        return again


@dataclass(eq=False)
class Tries:
    """The tries of one request's work, running or failed: which hosts to avoid, when to hedge or repeat a slow try,
    and which error the user gets."""

    journal: Journal
    kind: str  # of the model
    is_batch: bool
    capacity: int  # positions that the hosts reserve
    due_at: float  # the deadline
    patience_s: float  # how long the work may fail and be repeated on the same hosts
    gives_up_at: Callable[[float], float]  # until when to look for a path, by when that began
    hedging: Hedging
    suspects: Suspects
    # Finds a path that avoids some addresses if possible, over hosts that cache most of a text's prefixes.
    choose: Callable[[Collection[str], Sequence[bytes]], HostPath | None]
    may_replay: Callable[[], bool]  # whether one more request may have its text read again
    problem: Callable[[], str]  # why there is no path
    attempts: list[Attempt] = field(default_factory=list)  # running, the first one first
    blamed: set[str] = field(default_factory=set)  # addresses of hosts that failed this request
    failed_on: dict[HostPath, float] = field(default_factory=dict)  # paths on which the work failed, and when
    count: int = 0  # further tries of the current work, after the first
    forgotten: bool = False  # a host had dropped a prefix that it had listed
    _invalid_tries: int = 0  # tries that ended in a nonsense fault
    _cause: StatusError | None = None  # why the last try failed
    _waiting_since: float = 0.0
    _tried_at: float = 0.0
    _is_over: bool = False  # the patience has run out

    def work_begins(self, now_s: float) -> None:
        """Forget the failures of the previous work or step."""
        self.failed_on, self.count, self._invalid_tries, self._cause, self._waiting_since = {}, 0, 0, None, now_s
        self._is_over = False

    def begun(self, attempt: Attempt, now_s: float) -> None:
        """Record a new try."""
        attempt.replays, self._tried_at = self.count > 0, now_s
        self.attempts.append(attempt)

    def accept(self, attempt: Attempt, event: stage_pb2.Event) -> stage_pb2.Event | None:
        """The event to read, or None for one too many: a try whose hosts send results without end has failed."""
        most = self.capacity + attempt.results + MAX_EVENTS_BEYOND
        attempt.unread += 1
        if attempt.unread > most + 1:
            return None
        if attempt.unread > most:
            fault = stage_pb2.Fault(code=Code.INTERNAL.value[0], message="the hosts sent too many results")
            event = stage_pb2.Event(session=attempt.name, fault=fault)
        attempt.replays &= event.WhichOneof("outcome") == "fault"
        return event

    def whole(self, attempt: Attempt, event: stage_pb2.Event, now_s: float) -> stage_pb2.Event | None:
        """The result that `event` completes; None if batches are missing or the event is a duplicate. Raises
        StatusError."""
        due = self.journal.due, len(attempt.batches)
        found = event.number, event.scores.batch if event.HasField("scores") else due[1]
        if found < due:
            return None
        if found > due:
            raise internal(f"the result of {found[0]}, batch {found[1]}, arrived in place of {due[0]}, batch {due[1]}")
        check_timings(event.timings)
        # also after a second try: else long work would be tried twice for ever
        if not self.failed_on and attempt is self.attempts[0]:
            self.hedging.record(self._pace, now_s - self._waiting_since)
            self._waiting_since = now_s
        attempt.batches.append(event)
        if len(attempt.batches) < attempt.results:
            return None
        whole, attempt.batches = merged(attempt.batches), []
        return whole

    def wait_s(self, now_s: float) -> float:
        """Seconds to wait for an event before `hedge_path` is due."""
        left_s = self.due_at - now_s
        if len(self.attempts) < 2:  # no second try yet
            waited_s = now_s - max(self._waiting_since, self._tried_at)
            left_s = min(self.hedging.wait_s(self._pace, left_s) - waited_s, left_s)
        return max(left_s, 0.0)

    def hedge_path(self, now_s: float) -> HostPath | None:
        """A path for a second try alongside a slow one, if there is another. Raises StatusError at the deadline."""
        if now_s >= self.due_at:
            raise deadline_exceeded("the deadline passed before the hosts sent a result")
        self._tried_at = now_s
        current = [link.entry.address for attempt in self.attempts for link in attempt.path]
        path = self.choose([*self.blamed, *self.blamed, *current], ())  # a slow host is better than a failed one
        if not path or any(path == attempt.path for attempt in self.attempts) or not self.hedging.may_hedge():
            return None
        self.count += 1  # only here: slow work without another path has not failed
        return path

    def failed(self, attempt: Attempt, fault: stage_pb2.Fault, now_s: float) -> float | None:
        """End a try; returns the pause before the next, or None while another runs. Raises StatusError."""
        self.attempts.remove(attempt)
        if attempt.recalled and fault.code == Code.NOT_FOUND.value[0]:
            # a host had dropped a prefix that it had listed: that is no reason to avoid the host
            self.forgotten, self._cause = True, None
            for link in attempt.path:
                link.forget_prefixes()
            return None if self.attempts else 0.0
        work = self.journal.work
        has_schema = isinstance(work, stage_pb2.Read) and work.sample.sampling.HasField("grammar")
        if has_schema and fault.message.startswith(NOT_FOLLOWED):
            raise invalid(fault.message)  # it depends on schema and text alone: other hosts would report the same
        source = f"{fault.host}: " if fault.host else ""
        refusal = StatusError.numbered(fault.code, source + fault.message)
        is_invalid = refusal.code not in HOST_STATE_CODES
        late = refusal.code is Code.DEADLINE_EXCEEDED and now_s >= self.due_at - JITTER_S
        if not late:  # a late host may just have had no time to answer
            self._blame(attempt, fault, is_invalid and refusal.code not in IDENTITY_CODES, now_s)
        if self.attempts:
            return None
        if refusal.code in INTERNAL_CODES and not late:
            refusal = internal(refusal.message)
        self.count, self._invalid_tries, self._cause = self.count + 1, self._invalid_tries + is_invalid, refusal
        self.failed_on.setdefault(attempt.path, now_s)
        patient = now_s < min(self.failed_on.values()) + self.patience_s
        if late or (is_invalid and self._invalid_tries >= MAX_INVALID_TRIES):
            raise refusal
        if not patient or refusal.code is Code.RESOURCE_EXHAUSTED:
            # a hop that nobody takes is noticed only as patience runs out: an untried path still gets its try
            self._is_over = not patient
            path = self.choose(self._avoided, ())
            if path is None or path in ([attempt.path] if patient else self.failed_on):
                raise refusal
        return min(PAUSE_S * 2**self.count, MAX_PAUSE_S) if self.count > 1 else 0.0

    def next_path(self, prefixes: Sequence[bytes], since_s: float, now_s: float) -> HostPath | None:
        """The hosts of the next try; None while it must wait. Raises StatusError when that takes too long.

        :param since_s: when the search began."""
        path = self.choose(self._avoided, prefixes)
        if path is not None and (not self.count or self.may_replay()):
            return path
        if now_s > (self.due_at if path else min(self.gives_up_at(since_s), self.due_at)):
            problem = self._cause.message if self._cause else self.problem()
            raise unavailable(f"{problem} (waited {now_s - since_s:.1f} s)")
        return None

    def _blame(self, attempt: Attempt, fault: stage_pb2.Fault, is_invalid: bool, now_s: float) -> None:
        """Note the hosts to avoid: the one that did not take the work, else the one that reported the fault."""
        names = [(link.entry.name, link) for link in attempt.path]
        names += [(link.info.name, link) for link in attempt.path if link.info]  # its own name for itself
        source = next((link.entry.address for name, link in names if name == fault.host), "")
        if fault.lost and source:
            self.suspects.add(source, fault.lost, now_s)
        if is_invalid:  # its sender cannot be identified, so every host on the path is suspected
            self.blamed.update(link.entry.address for link in attempt.path)
        elif culprit := fault.lost or source:
            self.blamed.add(culprit)

    @property
    def _avoided(self) -> list[str]:
        """Addresses of hosts that failed this request; once patience has run out, also those of every failed try."""
        failed = (link.entry.address for path in self.failed_on for link in path if self._is_over)
        return [*self.blamed, *failed]

    @property
    def _pace(self) -> str:
        """Kind of the current work, for its usual time: the first batch of candidates has to pass all hosts."""
        work = self.journal.work
        if isinstance(work, PictureMessage):
            drawing = work.drawing  # work twice as long has a usual time of its own
            size = (len(drawing.classes) * drawing.levels).bit_length()
            return f"pictures by {self.kind}, 2^{size}"
        later = " more" if self.attempts and self.attempts[0].batches else ""
        scores = isinstance(work, stage_pb2.Read) and work.HasField("score")
        kind = f"{self.kind}{later} candidates" if scores else self.kind
        return f"{kind}, batch" if self.is_batch else kind
