"""What is watched of a process: its metrics server and its tracer, as far as they were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stages.figures import Family, Figures
from stages.seeing import SeeingSettings
from stages.traces import Tracer

if TYPE_CHECKING:
    from stages.exposition import MetricsServer


class Lookout:
    """Off until asked for: then nothing of Prometheus or OpenTelemetry is even imported."""

    def __init__(self, settings: SeeingSettings, service: str, name: str, insecure: bool) -> None:
        """:param service: `onesweep-stage` or `onesweep-router`; `name` which of them.

        Raises InputError."""
        self.settings, self.insecure = settings, insecure
        self.tracer = (
            None if settings.traces is None else Tracer(settings.traces, service, name, settings.trace_share, insecure)
        )
        self._metrics: MetricsServer | None = None

    def serve(self, families: Sequence[Family], read: Callable[[], Figures]) -> None:
        """Serve metrics, read on the running event loop. Raises InputError, ServiceError."""
        from stages.exposition import LoopCollector, MetricsServer

        assert self.settings.metrics is not None
        collector = LoopCollector(families, read, asyncio.get_running_loop())
        self._metrics = MetricsServer(self.settings.metrics, self.insecure, collector)

    async def close(self) -> None:
        """Stop serving, and send the spans that are left."""
        if self._metrics is not None:
            await self._metrics.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
