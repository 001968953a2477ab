"""Metrics for Prometheus: read on the event loop that counts them, and formatted on another thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Self
from wsgiref.simple_server import WSGIRequestHandler

from stages.errors import ServiceError, file_errors
from stages.wire.channel import parse_address

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

# Metrics are plain arrays that a scrape reads: prometheus_client needs a lock and one or two microseconds for each
# addition; these need a fifth of a microsecond.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
Kind = Literal["counter", "gauge", "histogram"]
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts of the values in each bucket, and their sum. Only one thread adds."""

    # a single writer needs no lock: a scrape reads on the writing event loop; a small model's hop is 150 us of Python

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """:param bounds: upper bounds, each inclusive; a last bucket counts larger values."""
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True)
class MetricFamily:
    """A metric as listed in the documentation; a counter's name ends with `_total`."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @classmethod
    def under(cls, prefix: str, name: str, kind: Kind, text: str, *labels: str) -> Self:
        return cls(prefix + name, kind, text, labels)


MetricValues = Mapping[str, Mapping[tuple[str, ...], float | Histogram]]  # values by family name and labels

# prometheus_client is imported only to serve metrics: a host counts without it.
READ_S = 2.0  # for the event loop to answer a scrape
CLIENT_S = 10.0  # for a scrape's client to send and read


class MetricsServer:
    """A server of `/metrics`, in its own thread. The values live on an event loop, which reads them all at the same
    moment."""

    def __init__(
        self,
        address: str,
        families: Sequence[MetricFamily],
        read: Callable[[], MetricValues],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Raises InputError, ServiceError for an address in use."""
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app, start_http_server

        self.families, self.read, self.loop = families, read, loop
        host, port = parse_address(address, "--metrics")
        registry = CollectorRegistry()
        registry.register(self)  # a collector by its methods
        ProcessCollector(registry=registry)
        with file_errors(ServiceError, f"cannot serve metrics on {address}", "give --metrics another port"):
            self._server, _ = start_http_server(port, host, registry)
        self._server.RequestHandlerClass = _Handler
        app = make_wsgi_app(registry)

        def scraped(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:  # noqa: ANN401
            try:
                return app(environ, start_response)
            except TimeoutError:
                log.warning("a scrape failed: the event loop did not answer within %g s", READ_S)
                start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
                return [b"this process is too busy to be read\n"]

        self._server.set_app(scraped)
        self.port = self._server.server_port
        log.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.port)

    def collect(self) -> list[Metric]:
        """The metrics of all families. Raises TimeoutError if the loop is too busy."""

        async def built() -> list[Metric]:
            values = self.read()
            return [_metric(family, values[family.name]) for family in self.families]

        building = asyncio.run_coroutine_threadsafe(built(), self.loop)
        try:
            return building.result(READ_S)
        finally:
            building.cancel()

    async def close(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    """A handler with a time-out that logs no requests."""

    timeout = CLIENT_S

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client is late, or gone
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _metric(family: MetricFamily, values: Mapping[tuple[str, ...], float | Histogram]) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for labels, buckets in values.items():
            assert isinstance(buckets, Histogram)
            ends = [*map(float, buckets.bounds), "+Inf"]  # the last one for the total count
            so_far = map(float, accumulate(buckets.counts))
            histogram.add_metric(labels, list(zip(map(str, ends), so_far, strict=True)), buckets.total)
        return histogram
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    metric = kinds[family.kind](family.name, family.text, labels=family.labels)
    for labels, value in values.items():
        assert not isinstance(value, Histogram)
        metric.add_metric(labels, value)
    return metric
