"""Observability of a server: the settings of metrics and logs, and the parts that they start.

No log line contains a prompt or a generated text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stages.errors import InputError, printable
from stages.settings import setting
from stages.wire.channel import is_loopback, parse_address

if TYPE_CHECKING:
    from stages.telemetry.prometheus import MetricFamily, MetricsServer, MetricValues

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(message)s"
# Fields of a line besides its message, passed as `extra` of the logging call.
FIELDS = ("request", "session", "mode", "code", "ms", "sweeps", "bytes", "method", "path", "status")


@dataclass(frozen=True)
class ObservabilitySettings:
    """Metrics and log of a process; without an address, metrics are off."""

    metrics: str | None = setting(None, "serve Prometheus metrics at this address", metavar="HOST:PORT")
    log_format: LogFormat = setting("text", "text or json", rare=True)


UNOBSERVED = ObservabilitySettings()


class Telemetry:
    """A process's metrics server. Prometheus is not imported while it is off."""

    def __init__(self, settings: ObservabilitySettings, insecure: bool) -> None:
        """Raises InputError for metrics on an address that other machines can reach, unless `insecure`."""
        if settings.metrics is not None:
            parse_address(settings.metrics, "--metrics")
            if not is_loopback(settings.metrics) and not insecure:
                raise InputError(
                    f"--metrics {settings.metrics} could be read by anyone from other machines: "
                    "give a loopback or tunnel address, or accept it with --insecure"
                )
        self.settings = settings
        self._metrics: MetricsServer | None = None

    def serve(self, families: Sequence[MetricFamily], read: Callable[[], MetricValues]) -> None:
        """Serve metrics, if they are on, that `read` returns on the running event loop. Raises ServiceError."""
        if self.settings.metrics is not None:
            from stages.telemetry.prometheus import MetricsServer

            self._metrics = MetricsServer(self.settings.metrics, families, read, asyncio.get_running_loop())

    async def close(self) -> None:
        if self._metrics is not None:
            await self._metrics.close()


class TextLines(logging.Formatter):
    """A formatter that writes one line per record, whatever its message contains, and a traceback below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, newline=" ")
        return super().formatMessage(record)


# Lines have a request's status code, never its error sentence, which may quote a field, and so a prompt.
class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object per line."""

    def __init__(self, name: str) -> None:
        """:param name: name of the logging host or router."""
        super().__init__()
        self.name = name

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "name": self.name,
            "message": record.getMessage(),
        }
        line |= {field: getattr(record, field) for field in FIELDS if getattr(record, field, "") != ""}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_log(log_format: LogFormat, name: str) -> None:
    """Send this process's log to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(name) if log_format == "json" else TextLines(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
