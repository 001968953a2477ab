"""Figures served to Prometheus: they become samples in a scrape, on the event loop that also counts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stages.errors import InputError, ServiceError
from stages.figures import Buckets, Family, Figures
from stages.transport import is_loopback, parse_address

log = logging.getLogger(__name__)

READ_S = 2.0
"""How long a scrape waits for the event loop."""


class LoopCollector(Collector):
    """Families whose figures live on an event loop: they are read there, all at one moment."""

    def __init__(
        self, families: Sequence[Family], read: Callable[[], Figures], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.families, self.read, self.loop = families, read, loop

    def collect(self) -> Iterator[Metric]:
        async def samples() -> list[Metric]:
            figures = self.read()
            return [_metric(family, figures[family.name]) for family in self.families]

        return iter(asyncio.run_coroutine_threadsafe(samples(), self.loop).result(READ_S))

    def describe(self) -> list[Metric]:
        """Nothing: a registry would otherwise collect as soon as it is told of this one."""
        return []


class MetricsServer:
    """`/metrics` over HTTP, in a thread of its own."""

    def __init__(self, address: str, insecure: bool, collector: Collector) -> None:
        """Raises InputError for an address that is not loopback without `insecure`, ServiceError for one in use."""
        check_metrics_address(address, insecure)
        host, port = parse_address(address, "--metrics")
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            reason = error.strerror or error
            raise ServiceError(f"cannot serve metrics on {address}: {reason}; give --metrics another port") from None
        log.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self._server.server_port)

    async def close(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def check_metrics_address(address: str, insecure: bool) -> None:
    """Raise InputError unless metrics may be served there."""
    parse_address(address, "--metrics")
    if not is_loopback(address) and not insecure:
        raise InputError(
            f"--metrics {address} could be read from other machines, by anyone: "
            "give a loopback or tunnel address, or accept it with --insecure"
        )


def _metric(family: Family, figures: Mapping[tuple[str, ...], float | Buckets]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for labels, buckets in figures.items():
            assert isinstance(buckets, Buckets)
            histogram.add_metric(labels, buckets.cumulative(), buckets.total)
        return histogram
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    metric = kinds[family.kind](family.name, family.text, labels=family.labels)
    for labels, value in figures.items():
        assert not isinstance(value, Buckets)
        metric.add_metric(labels, value)
    return metric
