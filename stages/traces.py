"""Traces: a span for each hop, under the span of its sweep, under that of its request.

The router decides which requests are traced, and says so by giving their hops a W3C trace context
(https://www.w3.org/TR/trace-context/). A hop without one costs a host nothing.
"""

from __future__ import annotations

import re
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.errors import InputError
from stages.refusal import Refusal
from stages.transport import is_loopback, parse_address

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from stages.engine import Job

FILE = "file:"
HTTPS = "https://"
EXPORT_S = 3.0
"""How long a collector may take for a batch; what it does not take is dropped."""
BATCH_MS = 1000
"""Pace at which spans leave."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Parent(NamedTuple):
    """A span in another process."""

    trace: int
    span: int
    sampled: bool


def parse_traceparent(text: str) -> Parent | None:
    """A W3C `traceparent` of version 00; None where it is not one, to the letter."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return Parent(int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & 1))


def traceparent_of(span: Span) -> str:
    """How `span` is named to another process."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class Tracer:
    """Makes one process's spans and sends them on, batch by batch from a thread of its own."""

    def __init__(self, target: str, service: str, name: str, share: float = 1.0, insecure: bool = False) -> None:
        """:param target: see `check_target`.
        :param service: what the process is, `onesweep-router` or `onesweep-stage`; `name` which of them.
        :param share: of the traces that begin here. One that began elsewhere is gone on with where that was sampled.

        Raises InputError where the extra `traces` is not installed, or the file cannot be written.
        """
        check_target(target, insecure)
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

            exporter = _exporter(target)
        except ImportError:
            raise InputError("--traces needs OpenTelemetry: pip install 'onesweep[traces]'") from None
        attributes = {"service.name": service, "service.instance.id": name, "service.version": version("onesweep")}
        self._provider = TracerProvider(ParentBasedTraceIdRatio(share), Resource(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=BATCH_MS))
        self._tracer = self._provider.get_tracer("onesweep")

    def begin(self, name: str, parent: Span | None = None) -> Span:
        """A span from now on; without a parent a trace begins, if its lot is drawn."""
        return self._tracer.start_span(name, _within(parent))

    def ended(self, job: Job) -> None:
        """The span of a hop that has its result."""
        from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

        hop, parent = job.hop, parse_traceparent(job.hop.traceparent)
        if parent is None or not parent.sampled:
            return
        above = SpanContext(parent.trace, parent.span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        work = hop.sweep if hop.WhichOneof("work") == "sweep" else hop.step
        ran_s = time.perf_counter() - job.accepted_at
        now_ns = time.time_ns()
        span = self._tracer.start_span(
            "hop",
            _within(NonRecordingSpan(above)),
            start_time=now_ns - int(ran_s * 1e9),
            attributes={
                "onesweep.request": hop.request,
                "onesweep.model": job.session.kind,
                "onesweep.number": work.number,
                "onesweep.queue_ms": job.queue_ms,
                "onesweep.compute_ms": job.compute_ms,
                "onesweep.received_bytes": job.received_bytes,
            },
        )
        if isinstance(job.result, Refusal):
            span.set_status(Status(StatusCode.ERROR, job.result.code.name))
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left; takes up to EXPORT_S."""
        self._provider.shutdown()


def check_target(target: str, insecure: bool) -> None:
    """Raise InputError unless spans can go to `target`: HOST:PORT or https://HOST:PORT of an OTLP collector, or
    file:PATH. HOST:PORT is not encrypted, so it must be loopback, or `insecure` said."""
    if target == FILE:
        raise InputError("--traces file: names no file: give file:PATH")
    if target.startswith(FILE):
        return
    parse_address(target.removeprefix(HTTPS), "--traces")
    if not target.startswith(HTTPS) and not is_loopback(target) and not insecure:
        raise InputError(
            f"--traces {target} is another machine and traffic is not encrypted: run a collector on this one, "
            f"give https://{target}, or accept it with --insecure"
        )


def _within(parent: Span | None) -> Context:
    """Never what OpenTelemetry holds to be current: parents are named."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return Context() if parent is None else set_span_in_context(parent, Context())


def _exporter(target: str) -> SpanExporter:
    if target.startswith(FILE):
        from stages.span_file import SpanFile

        return SpanFile(target.removeprefix(FILE))
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    secure = target.startswith(HTTPS)
    endpoint = target if secure else f"http://{target}"
    direct: Any = (("grpc.enable_http_proxy", 0),)  # whatever proxy the shell has for the web
    return OTLPSpanExporter(endpoint, insecure=not secure, timeout=EXPORT_S, channel_options=direct)
