"""A request's ticket: the name that logs, metrics, traces and hosts know it by, and what they are told at its end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from serving.accounting import Account
from serving.v1 import router_pb2
from stages.refusal import REQUEST, Refusal
from stages.traces import Tracer, traceparent_of
from stages.v1 import stage_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from serving.metrics import RouterFigures

log = logging.getLogger(__name__)

JITTER_MS = 20
"""A client that gives up so shortly before its deadline was told by its own clock that it had passed."""
UNKNOWN_MODE = "unknown"
"""What a mode is called that does not exist: nothing that a client made up becomes a label, or part of a log."""

_current: ContextVar[Ticket | None] = ContextVar("ticket", default=None)


class Tickets:
    """Gives every request its ticket."""

    def __init__(self, figures: RouterFigures | None = None, tracer: Tracer | None = None) -> None:
        self.figures, self.tracer = figures, tracer

    def open(self, mode: str, deadline_unix_ms: int) -> Ticket:
        """A ticket for `with`: it lies on the table for `stamp` and `arrived`, and is closed however the block ends.

        :param mode: one that exists, or UNKNOWN_MODE."""
        return Ticket(self, mode, deadline_unix_ms)


class Ticket:
    """One request."""

    def __init__(self, tickets: Tickets, mode: str, deadline_unix_ms: int) -> None:
        self.mode, self.deadline_unix_ms = mode, deadline_unix_ms
        self.name = secrets.token_hex(8)
        self.account = Account()
        self.summary: router_pb2.Summary | None = None
        """Once the request is done."""
        self.code = grpc.StatusCode.OK
        self._reason = ""
        self._begin = time.perf_counter()
        self._tickets = tickets
        self._span: Span | None = None
        """None where this request is not traced."""
        self._sweep: Span | None = None
        self._arrived_ns: int | None = None

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return self.deadline_unix_ms / 1000 - time.time()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((REQUEST, self.name),)

    def __enter__(self) -> Self:
        _current.set(self)  # never taken back: every call has a context of its own
        if self._tickets.tracer is not None:
            span = self._tickets.tracer.begin("request")
            self._span = span if span.is_recording() else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        self._end_sweep()
        if self._span is not None:
            self._end_span(self._span)
        if self._tickets.figures is not None:
            self._tickets.figures.ended(self)
        self._log()

    def stamp(self, hop: stage_pb2.Hop) -> None:
        """Name the request, and its trace, in work that leaves for the hosts."""
        hop.request = self.name
        if self._span is None or self._tickets.tracer is None:
            return
        self._end_sweep()
        work = hop.sweep if hop.WhichOneof("work") == "sweep" else hop.step
        self._sweep = sweep = self._tickets.tracer.begin("sweep", self._span)
        sweep.set_attributes({"onesweep.request": self.name, "onesweep.number": work.number})
        hop.traceparent = traceparent_of(sweep)

    def arrived(self) -> None:
        """A result of that work came."""
        if self._sweep is not None:
            self._arrived_ns = time.time_ns()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Refusal):
            self.code = error.code
            # a sentence about a wrong field may quote it, and nothing that a client sent is logged
            self._reason = "" if error.code is grpc.StatusCode.INVALID_ARGUMENT else error.message
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            late = time.time() * 1000 >= self.deadline_unix_ms - JITTER_MS
            self.code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        else:
            self.code = grpc.StatusCode.UNKNOWN

    def _end_sweep(self) -> None:
        """AR steps of one push are one span: it ends with the last result that came."""
        if self._sweep is not None:
            if self._arrived_ns is None:
                _mark_failed(self._sweep, "no result came")
            self._sweep.end(self._arrived_ns)
        self._sweep = self._arrived_ns = None

    def _end_span(self, span: Span) -> None:
        account = self.account
        span.set_attributes(
            {
                "onesweep.request": self.name,
                "onesweep.mode": self.mode,
                "onesweep.sweeps": account.sweeps,
                "onesweep.output_bytes": account.output_bytes,
                "onesweep.output_tokens": account.output_tokens,
                "onesweep.wire_bytes": account.wire_bytes_total,
            }
        )
        if self.code is not grpc.StatusCode.OK:
            _mark_failed(span, self.code.name)
        span.end()

    def _log(self) -> None:
        account, ms = self.account, (time.perf_counter() - self._begin) * 1000
        log.info(
            "request %s %s %s: %d bytes, %d sweeps, %.1f ms%s",
            *(self.name, self.mode, self.code.name, account.output_bytes, account.sweeps, ms),
            f" ({self._reason})" if self._reason else "",
            extra={
                "request": self.name,
                "mode": self.mode,
                "code": self.code.name,
                "ms": round(ms, 3),
                "sweeps": account.sweeps,
                "bytes": account.output_bytes,
            },
        )


def stamp(hop: stage_pb2.Hop) -> None:
    """`Ticket.stamp` of the request that is being served here."""
    if (ticket := _current.get()) is not None:
        ticket.stamp(hop)


def arrived() -> None:
    """`Ticket.arrived` of the request that is being served here."""
    if (ticket := _current.get()) is not None:
        ticket.arrived()


def _mark_failed(span: Span, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, why))
