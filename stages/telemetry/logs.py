"""Logs of servers, as text for people or JSON for collectors. No line holds a prompt or a generated text."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal, get_args

from stages.errors import InputError

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
TEXT = "%(asctime)s %(levelname)s %(message)s"
# Fields of a line beside its message, given as `extra` of the logging call.
FIELDS = ("request", "session", "mode", "code", "ms", "sweeps", "bytes", "method", "path", "status")


# Lines have a request's status code, never its error sentence: that may quote a field, and a field may hold a prompt.
class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object a line."""

    def __init__(self, name: str) -> None:
        """:param name: of the host or router that logs."""
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


def check_log_format(text: str) -> LogFormat:
    """`text` as a format. Raises InputError."""
    for log_format in LOG_FORMATS:
        if text == log_format:
            return log_format
    raise InputError(f"unknown --log-format {text!r}; choose from {', '.join(LOG_FORMATS)}")


def start_log(log_format: LogFormat, name: str) -> None:
    """Send this process's log to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(name) if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
