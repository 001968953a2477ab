"""Metrics for Prometheus: copied on the event loop that counts them, formatted on another thread."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stages.errors import ServiceError
from stages.telemetry.histograms import Histogram, MetricFamily, MetricValues
from stages.wire.channel import parse_address

log = logging.getLogger(__name__)

Application = Callable[..., Iterable[bytes]]

READ_S = 2.0  # time for the event loop to answer a scrape
CLIENT_S = 10.0  # time for the client of a scrape to send and read


class LoopCollector(Collector):
    """Metric families whose values live on an event loop, where they are all copied at one moment."""

    def __init__(
        self, families: Sequence[MetricFamily], read: Callable[[], MetricValues], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.families, self.read, self.loop = families, read, loop

    def collect(self) -> Iterator[Metric]:
        """Raises TimeoutError when the loop is too busy."""

        async def copied() -> MetricValues:
            return {name: {labels: copy(value) for labels, value in rows.items()} for name, rows in self.read().items()}

        copying = asyncio.run_coroutine_threadsafe(copied(), self.loop)
        try:
            figures = copying.result(READ_S)
        finally:
            copying.cancel()
        return (_metric(family, figures[family.name]) for family in self.families)

    def describe(self) -> list[Metric]:
        """Return nothing: otherwise the registry would collect at once when this is registered."""
        return []


class MetricsServer:
    """A server of `/metrics`, in a thread of its own."""

    def __init__(self, address: str, collector: Collector) -> None:
        """Raises InputError, ServiceError for an address that is in use."""
        host, port = parse_address(address, "--metrics")
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            reason = error.strerror or error
            raise ServiceError(f"cannot serve metrics on {address}: {reason}; give --metrics another port") from None
        self._server.RequestHandlerClass = _Handler
        self._server.set_app(_patient(make_wsgi_app(registry)))
        self.port = self._server.server_port
        log.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.port)

    async def close(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    """A handler with a time-out, which logs no request."""

    timeout = CLIENT_S

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # late, or gone
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _patient(app: Application) -> Application:
    """The same app, which answers 503 while the event loop is busy."""

    def scraped(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401
        try:
            return app(environ, start_response)
        except TimeoutError:
            log.warning("a scrape failed: the event loop did not answer within %g s", READ_S)
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"this process is too busy to be read\n"]

    return scraped


def _metric(family: MetricFamily, figures: Mapping[tuple[str, ...], float | Histogram]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for labels, buckets in figures.items():
            assert isinstance(buckets, Histogram)
            histogram.add_metric(labels, buckets.cumulative(), buckets.total)
        return histogram
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    metric = kinds[family.kind](family.name, family.text, labels=family.labels)
    for labels, value in figures.items():
        assert not isinstance(value, Histogram)
        metric.add_metric(labels, value)
    return metric
