"""What is watched of a process: its metrics server and its tracer, as far as they were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stages.errors import InputError
from stages.figures import Family, Figures
from stages.seeing import SeeingSettings
from stages.traces import Tracer
from stages.transport import is_loopback, parse_address

if TYPE_CHECKING:
    from stages.exposition import MetricsServer


class Lookout:
    """Off until asked for: then nothing of Prometheus or OpenTelemetry is even imported."""

    def __init__(self, settings: SeeingSettings, service: str, name: str, insecure: bool) -> None:
        """:param service: `onesweep-stage` or `onesweep-router`; `name` which of them.

        Raises InputError."""
        if settings.metrics is not None:
            check_metrics_address(settings.metrics, insecure)
        self.settings = settings
        self.tracer = (
            None if settings.traces is None else Tracer(settings.traces, service, name, settings.trace_share, insecure)
        )
        self._metrics: MetricsServer | None = None

    def serve(self, families: Sequence[Family], read: Callable[[], Figures]) -> None:
        """Serve metrics, read on the running event loop. Raises ServiceError."""
        from stages.exposition import LoopCollector, MetricsServer

        assert self.settings.metrics is not None
        collector = LoopCollector(families, read, asyncio.get_running_loop())
        self._metrics = MetricsServer(self.settings.metrics, collector)

    async def close(self) -> None:
        """Stop serving, and send the spans that are left."""
        if self._metrics is not None:
            await self._metrics.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


def check_metrics_address(address: str, insecure: bool) -> None:
    """Raise InputError unless metrics may be served there."""
    parse_address(address, "--metrics")
    if not is_loopback(address) and not insecure:
        raise InputError(
            f"--metrics {address} could be read from other machines, by anyone: "
            "give a loopback or tunnel address, or accept it with --insecure"
        )
