"""Continuous batching: hops of many sessions share forward passes on one thread.

A pass computes one piece of each hop in it, so a new hop joins at the next pass, and a finished one leaves. AR steps go
first and all together, for a step is a few rows and a user waits for every one. Sweeps, pictures and candidates to
score fill the rest of a pass, the oldest first: beyond about a hundred rows a processor gains nothing from a larger
batch, while the oldest hop can move on to the next host as soon as it is done. While no hops are under way, drafters
run ahead of the verification of their last draft.
"""

import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from torch import Tensor

from stages.backends.base import BranchPiece, CleanPiece, NoisyPiece
from stages.backends.whole_model import Continuations, KnownText
from stages.clock import monotonic
from stages.host.grammar import GRAMMAR_BYTES
from stages.host.parts import WARM_POSITIONS, Parts
from stages.host.plan import ModelKind
from stages.host.sessions import HostSession
from stages.pictures.trajectory import PicturePiece
from stages.v1 import stage_pb2
from stages.wire.messages import Outcome
from stages.wire.status import StatusError, deadline_exceeded, exhausted, internal

log = logging.getLogger(__name__)

# The work of a hop on its host: parsed, begun, and computed call by call.


@dataclass(frozen=True)
class KernelCall:
    """Work for the backend."""

    # The runner's method for such pieces: pieces with the same method share a call.
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    piece: CleanPiece | BranchPiece | NoisyPiece | PicturePiece | Continuations | KnownText | Tensor
    rows: int


@dataclass(eq=False, kw_only=True)
class HopWork(ABC):
    """One hop on this host. Its fields are its message, checked and decoded."""

    hop: stage_pb2.Hop  # becomes the message for the next host, in place
    kind: ModelKind
    number: int  # 0, 1, 2 ... in a session
    outcome: Outcome | None = field(default=None, init=False)  # set once everything is computed
    # The event for the router, if the outcome begins the next step.
    result: stage_pb2.Event | None = field(default=None, init=False)
    # An event for the router in addition to an outcome for the next host; made once the outcome is on its way.
    preview: Callable[[], stage_pb2.Event] | None = field(default=None, init=False)

    # AR steps are computed before all else: each is a few rows, and a user waits for it.
    is_step = False
    drafts = False  # whether this host's drafter takes part
    compiles = False  # whether this host holds its text to a schema, whose compilation happens once
    # Whether this is the beginning of a long step, without a result of its own; whether more hops of the step follow.
    is_prefill = has_more = False

    def begin(self, session: HostSession, following: int) -> None:
        """Enter the host's first part.

        :param following: the block or stage after those of this host.
        """
        self.session, self.following = session, following

    @property
    @abstractmethod
    def rows(self) -> int:
        """Positions or patches in the next call."""

    @abstractmethod
    def next_op(self) -> KernelCall:
        """The next call. Valid only while there is no outcome."""

    @abstractmethod
    def complete(self, result: Any) -> None:  # noqa: ANN401 - of the type that the call's method returns
        """Continue with the result of the last call."""

    @property
    def between_reads(self) -> bool:
        """True if the next call is for the host's first stage: an AR step passes all stages in one pass."""
        return True

    def extra_bytes(self, parts: Parts, capacity: int) -> int:
        """Memory that it takes on this host on top of the caches of a session of `capacity` positions. Raises
        StatusError if the host can have none for it."""
        return GRAMMAR_BYTES if self.compiles else 0

    def draft_ahead(self) -> bool:
        """Draft a token beyond the draft that this work sent; False if nothing is left to do."""
        return False


@dataclass(eq=False, kw_only=True)
class TextWork(HopWork):
    """New tokens of one session, and their purpose."""

    start: int  # position of the first new token; 0 opens a session
    clean: Tensor  # the new tokens, (tokens,) int64
    positions: int  # that the new tokens take
    remembered: int  # how many of those positions the session keeps


# When it is computed.

# A pass takes sweeps and pictures, the oldest first, until it has this many rows. If every pass held all of them, all
# would leave the host at the same moment, and the next host would idle until then.
PASS_ROWS = 256
# AR steps of up to this many new positions together are computed on the event loop, if passes took less than this time
# in the warm-up and in the last pass. Work that the warm-up did not measure goes to the thread.
QUICK_MS, QUICK_ROWS = 3.0, 64
# Hops of batch requests sit out this many passes while others have work, then share one, so they do not starve.
MAX_YIELDS = 7


@dataclass
class ScheduledHop:
    """One accepted hop."""

    work: HopWork
    session: HostSession
    received_bytes: int
    due_at: float  # its deadline, by this machine's monotonic clock
    accepted_at: float = field(default_factory=monotonic)
    compute_ms: float = 0.0  # its share of the passes that it took part in
    queue_ms: float = 0.0  # the rest of its time here: waiting for other hops or computed along with them
    result: Outcome | StatusError | None = None


OnPass = Callable[[list[ScheduledHop]], object]


class Scheduler:
    """Owns the hops from their acceptance to their result."""

    def __init__(self, following: int, limit: int, most_hops: int, on_pass: OnPass = lambda jobs: None) -> None:
        """:param following: the block or stage after those of this host.
        :param limit: most hops under way; one more is refused.
        :param most_hops: most hops in a pass; 1 = one after another.
        :param on_pass: called with the hops of each pass, before it."""
        self.following, self.limit, self.most_hops, self.on_pass = following, limit, most_hops, on_pass
        self._arrived: deque[ScheduledHop] = deque()
        self._waiting: list[ScheduledHop] = []
        """Hops that wait for an earlier hop of their session to end: they share its caches."""
        self._jobs: list[ScheduledHop] = []
        self._ahead: deque[HopWork] = deque()
        """Steps that may draft beyond their last draft, in turns."""
        self._wake = threading.Condition()
        self._passing = threading.Lock()
        """Held during a pass: its holder owns `_waiting` and `_jobs`."""
        self.steps_ms = 0.0
        """Duration of the AR steps of the last pass; 0 before the first."""
        self._stopping = False
        self._yields = 0

    def __len__(self) -> int:
        """Hops under way."""
        return len(self._arrived) + len(self._waiting) + len(self._jobs)

    @property
    def full(self) -> bool:
        """True if the limit of steps and sweeps under way is reached; all pieces of one count as one: else four long
        prompts would fill the queue, and the last pieces of a step would be refused after its first."""
        return len({id(job.session) for job in (*self._arrived, *self._waiting, *self._jobs)}) >= self.limit

    @property
    def arrived(self) -> list[ScheduledHop]:
        """Jobs that no pass has begun."""
        return list(self._arrived)

    def submit(self, job: ScheduledHop) -> None:
        """Queue a job; `go` starts its computation."""
        self._arrived.append(job)

    def go(self) -> list[ScheduledHop]:
        """Compute submitted jobs: here and now if that is quick, else in `run`. Returns jobs with a result.

        Waking another thread and sharing Python's lock with it take longer than an AR step of a small model.
        """
        ended: list[ScheduledHop] = []
        if self._is_quick() and self._passing.acquire(blocking=False):
            try:
                if not self._jobs and not self._waiting:
                    ended = self._turn()
            finally:
                self._passing.release()
        if self._arrived or self._waiting or self._jobs:
            with self._wake:
                self._wake.notify()
        return ended

    def run(self, deliver: Callable[[list[ScheduledHop]], None]) -> None:
        """Compute until `stop`; hands over jobs as soon as they have a result. Blocks: give it a thread."""
        while self._wait():
            if ended := self.turn():
                deliver(ended)

    def turn(self) -> list[ScheduledHop]:
        """One pass; or, while no hop is under way, one draft token of one session, so a new hop waits for no more than
        that. Returns the jobs that now have a result."""
        with self._passing:
            if len(self):
                return self._turn()
            if self._ahead and (work := self._ahead.popleft()).draft_ahead():
                self._ahead.append(work)
            return []

    def stop(self) -> None:
        """Make `run` return after its current pass."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _is_quick(self) -> bool:
        """True if only a few rows of AR steps arrived, and such a pass is quick."""
        if self.steps_ms >= QUICK_MS:
            return False
        rows, fewest = 0, QUICK_ROWS
        for job in self.arrived:  # of a copy: the engine's thread may be taking jobs from it
            rows += job.work.clean.shape[0] if isinstance(job.work, TextWork) else 0
            fewest = min(fewest, _quick_rows(job))
        return rows <= fewest

    def _turn(self) -> list[ScheduledHop]:
        """One pass, with one piece of every hop in it; returns the jobs that now have a result."""
        self._take_in()
        running, others = self._first_in_line()
        self.on_pass([*running, *others])
        begin = monotonic()
        while running:  # through all stages of this host
            _advance(running)
            running = [job for job in running if job.result is None and not job.work.between_reads]
            self.steps_ms = (monotonic() - begin) * 1000
        if others:
            _advance(others)
        ended, now = [job for job in self._jobs if job.result is not None], monotonic()
        self._jobs = [job for job in self._jobs if job.result is None]
        for job in ended:
            begin = max(job.accepted_at, job.session.free_at)  # waited for others, not for pieces of the same step
            job.queue_ms = max((now - begin) * 1000 - job.compute_ms, 0.0)
            job.session.free_at = now
            if isinstance(job.result, stage_pb2.Hop) and job.work.drafts:
                self._ahead.append(job.work)
        return ended

    def _wait(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or len(self) or self._ahead)
            return not self._stopping

    def _take_in(self) -> None:
        """Begin the jobs that arrived; end the ones that are late or that no request waits for."""
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        waiting, self._waiting = self._waiting, []
        working = set[int]()
        for job in self._jobs:
            working.add(id(job.session))
            self._end_if_useless(job)
        for job in waiting:
            if id(job.session) in working:
                self._waiting.append(job)
                continue
            working.add(id(job.session))
            self._jobs.append(job)
            self._end_if_useless(job)
            if job.result is None:
                begin = monotonic()
                try:
                    job.work.begin(job.session, self.following)
                except Exception:
                    _fail([job])
                job.compute_ms += (monotonic() - begin) * 1000

    @staticmethod
    def _end_if_useless(job: ScheduledHop) -> None:
        if job.session.released:
            job.result = StatusError(grpc.StatusCode.CANCELLED, "the session was released")
        elif job.due_at <= monotonic():
            job.result = deadline_exceeded("the deadline passed while the work was waiting")

    def _first_in_line(self) -> tuple[list[ScheduledHop], list[ScheduledHop]]:
        """AR steps and other work for a pass: the oldest of each, until their pieces fill it; at least one."""
        able = [job for job in self._jobs if job.result is None]
        urgent = [job for job in able if not job.work.hop.batch]
        # leave out hops of batch requests while other hops exist; in their turn, all hops take part
        yields = 0 < len(urgent) < len(able) and self._yields < MAX_YIELDS
        self._yields = self._yields + 1 if yields else 0
        steps, others, rows = list[ScheduledHop](), list[ScheduledHop](), [0, 0]
        for job in (urgent if yields else able)[: None if self.most_hops > 1 else 1]:
            is_step = job.work.is_step
            taken = steps if is_step else others
            if rows[is_step] < PASS_ROWS and len(taken) < self.most_hops:
                taken.append(job)
                rows[is_step] += job.work.rows
        return steps, others


def _quick_rows(job: ScheduledHop) -> int:
    """Rows of the largest pass that may compute an AR step on the event loop; below zero where none may."""
    work, session = job.work, job.session
    is_quick = (
        isinstance(work, TextWork)
        and work.is_step
        and work.start + work.positions <= WARM_POSITIONS
        and not work.drafts  # a drafter computes, too
        and session.pending <= 1  # work computed here must not overtake a piece on the thread
        and not (session.beginning and session.beginning.recalled)  # megabytes to copy
        and not (work.compiles and session.grammar is None)
    )
    return session.parts.quick_rows.get(job.work.hop.digest, 0) if is_quick else -1


def _fail(jobs: Sequence[ScheduledHop]) -> None:
    """End jobs with the error being handled: a refusal as it is; any other error goes into the log."""
    if not isinstance(refusal := sys.exception(), StatusError):
        requests, sessions = (", ".join(getattr(job.work.hop, name) for job in jobs) for name in ("request", "session"))
        log.exception("session %s: a hop failed", sessions, extra={"request": requests, "session": sessions})
        refusal = internal("a hop failed; the host's log says why")
    for job in jobs:
        job.result = refusal


# A job, its next call, and the length of its piece's caches before the call.
_Member = tuple[ScheduledHop, KernelCall, int]


def _advance(jobs: Sequence[ScheduledHop]) -> None:
    """Compute the next piece of each job; pieces for the same method of the same part share one call."""
    groups: dict[Callable[..., Any], list[_Member]] = {}
    for job in jobs:
        begin = monotonic()
        try:
            call = job.work.next_op()
        except Exception:
            _fail([job])
            continue
        job.compute_ms += (monotonic() - begin) * 1000
        caches = getattr(call.piece, "caches", ())
        groups.setdefault(call.compute, []).append((job, call, caches[0].length if caches else 0))
    for compute, members in groups.items():
        begin, rows = monotonic(), 0
        if (results := _tried(compute, members)) is None:
            results = _one_by_one(compute, members)
        for (job, call, _), result in zip(members, results, strict=True):
            rows += call.rows
            if job.result is not None:
                continue
            try:
                job.work.complete(result)
                job.result = job.work.outcome
            except Exception:
                _fail([job])
        per_row_ms = (monotonic() - begin) * 1000 / rows
        for job, call, _ in members:
            job.compute_ms += per_row_ms * call.rows


def _one_by_one(compute: Callable[..., Any], members: Sequence[_Member]) -> Sequence[Any]:
    """Results of pieces whose shared call failed, or whose device lacked memory for all. A piece that fails alone, too,
    gets an error as its hop's result, and None here."""
    results = list[Any]()
    for member in members:
        job, call, length = member
        for cache in getattr(call.piece, "caches", ()):
            cache.length = length  # the call may have appended to some of them
        alone = None if job.result else _tried(compute, [member])
        if alone is None and job.result is None:
            words = "no memory left on this host's device for the hop: try again later"
            job.result = exhausted(words, retry_after_ms=1000)
        results.append(alone[0] if alone else None)
    return results


def _tried(compute: Callable[..., Any], members: Sequence[_Member]) -> Sequence[Any] | None:
    """Results of a call; None if it failed. A hop that was alone in the call then gets an error as its result, unless
    memory ran out. The caller retries outside of the handler: an error being handled holds memory."""
    try:
        return compute([call.piece for _, call, _ in members])
    except torch.OutOfMemoryError:
        return None
    except Exception:
        if len(members) == 1:
            _fail([members[0][0]])
        else:
            log.warning("a batch of %d hops failed; computing each one alone", len(members), exc_info=True)
    return None
