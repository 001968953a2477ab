"""Traces: a span for each hop, under the span of its sweep, under that of its request.

The router chooses the traced requests and gives their hops a W3C trace context
(https://www.w3.org/TR/trace-context/). A hop without one costs a host nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from stages.errors import InputError
from stages.wire.channel import is_loopback, parse_address

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span


MOST_BATCH_BYTES = 1 << 22  # more than the spans of a batch
FILE = "file:"
HTTPS = "https://"
EXPORT_S = 3.0  # time for a collector to take a batch; a batch that it does not take is dropped
BATCH_MS = 1000  # time between two batches


def traceparent_of(span: Span) -> str:
    """The name of `span` for another process, a W3C `traceparent`."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, _within(span))
    return carrier["traceparent"]


class Tracer:
    """Makes one process's spans and sends them on, batch by batch from a thread of its own."""

    def __init__(self, target: str, service: str, name: str, share: float = 1.0, insecure: bool = False) -> None:
        """:param target: see `check_target`.
        :param service: `onesweep-router` or `onesweep-stage`.
        :param name: of this router or host.
        :param share: of the traces that begin here; a trace from elsewhere continues if it was sampled there.

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
            raise InputError("traces needs OpenTelemetry: pip install 'onesweep[traces]'") from None
        attributes = {"service.name": service, "service.instance.id": name, "service.version": version("onesweep")}
        self._provider = TracerProvider(ParentBasedTraceIdRatio(share), Resource(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=BATCH_MS))
        self._tracer = self._provider.get_tracer("onesweep")

    def begin(self, name: str, parent: Span | None = None) -> Span:
        """Begin a span; without a parent it begins a trace, which is sampled by `share`."""
        return self._tracer.start_span(name, _within(parent))

    def record(
        self, name: str, traceparent: str, ran_s: float, attributes: Mapping[str, str | float], error: str = ""
    ) -> None:
        """Record a span that ends now, under a parent in another process, if that one was sampled.

        :param error: name of a gRPC status; empty for a success.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # W3C would send a context with a flag for "not sampled": no context at all saves 55 bytes a hop
        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
        if not get_current_span(parent).get_span_context().trace_flags.sampled:
            return
        now_ns = time.time_ns()
        begin_ns = now_ns - int(ran_s * 1e9)
        span = self._tracer.start_span(name, parent, start_time=begin_ns, attributes=dict(attributes))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left; takes up to EXPORT_S."""
        self._provider.shutdown()


def check_target(target: str, insecure: bool) -> None:
    """Raise InputError unless spans can go to `target`: HOST:PORT or https://HOST:PORT of an OTLP collector, or
    file:PATH. HOST:PORT is not encrypted, so it must be loopback, or `insecure` said."""
    if target == FILE:
        raise InputError("traces file: names no file: give file:PATH")
    if target.startswith(FILE):
        return
    parse_address(target.removeprefix(HTTPS), "traces")
    if not target.startswith(HTTPS) and not is_loopback(target) and not insecure:
        raise InputError(
            f"traces {target} is another machine and traffic is not encrypted: run a collector on this one, "
            f"give https://{target}, or accept it with --insecure"
        )


def _within(parent: Span | None) -> Context:
    """A context with this parent only, without OpenTelemetry's current span."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return Context() if parent is None else set_span_in_context(parent, Context())


def _exporter(target: str) -> SpanExporter:
    if target.startswith(FILE):
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        path = target.removeprefix(FILE)
        try:
            # several processes may share it: a batch is one write to its end, so lines stay whole
            file = open(path, "a", MOST_BATCH_BYTES, opener=partial(os.open, mode=0o600))  # noqa: SIM115 - for good
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; name another file in --traces") from None
        return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    secure = target.startswith(HTTPS)
    endpoint = target if secure else f"http://{target}"
    direct: Any = (("grpc.enable_http_proxy", 0),)  # without the shell's proxy for the web
    return OTLPSpanExporter(endpoint, insecure=not secure, timeout=EXPORT_S, channel_options=direct)
