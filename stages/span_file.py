"""Spans as lines of JSON, for machines without a collector."""

from __future__ import annotations

import os
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from stages.errors import InputError


class SpanFile(SpanExporter):
    """Appends to a file that several processes may share: a batch goes in one write, so their lines stay whole."""

    def __init__(self, path: str) -> None:
        """Raises InputError."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; name another file in --traces") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(span.to_json(indent=None) + "\n" for span in spans).encode()
        try:
            written = os.write(self._file, lines)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if written == len(lines) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        os.close(self._file)
