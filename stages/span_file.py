"""Spans as lines of JSON, for machines without a collector."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from stages.errors import InputError

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Of a file; what comes then is dropped: a disk that is full would end more than traces."""


class SpanFile(SpanExporter):
    """Appends to a file that several processes may share: a batch goes in one write, so their lines stay whole."""

    def __init__(self, path: str) -> None:
        """Raises InputError."""
        self._path, self._is_full = path, False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; name another file in --traces") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(span.to_json(indent=None) + "\n" for span in spans).encode()
        try:
            if os.fstat(self._file).st_size + len(lines) > MOST_BYTES:
                if not self._is_full:
                    log.warning("%s has %d bytes, the most: no more spans are written there", self._path, MOST_BYTES)
                self._is_full = True
                return SpanExportResult.FAILURE
            while lines:
                lines = lines[os.write(self._file, lines) :]
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)
