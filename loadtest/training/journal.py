"""The log of a run's rounds, read while it grows by somebody who does not write it."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import ServiceError

NAME = "log.jsonl"
FIRST = "0" * 64
"""What stands in the first line for the digest of the line before."""


@dataclass(frozen=True)
class Entry:
    """One line of the log: the run, an update that was `accepted` or `dropped`, or a round that was `closed`."""

    at_s: float
    """When it was first seen, seconds of the monotonic clock."""
    record: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.record["kind"])

    @property
    def part(self) -> str:
        return str(self.record.get("part", ""))


class Journal:
    """Every line so far. `look` reads what is new; a line counts when its end is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self._size, self._last = 0, FIRST

    def look(self) -> list[Entry]:
        """What came since the last look. Raises ServiceError where a line that was there has changed or gone."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._size:
                    raise ServiceError(f"{self.path} has become shorter than what was committed to it")
                file.seek(self._size)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        now, new = time.monotonic(), []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            new.append(Entry(now, self._read(line)))
        self.entries += new
        return new

    def closed(self, part: str) -> int:
        """Rounds of a part that were closed."""
        return sum(entry.kind == "closed" and entry.part == part for entry in self.entries)

    @property
    def accepted(self) -> int:
        return sum(entry.kind == "accepted" for entry in self.entries)

    def _read(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("before") != self._last:
            raise ServiceError(f"{self.path} does not go on from the line that was its last: {line[:80]!r}")
        self._size, self._last = self._size + len(line), hashlib.sha256(line).hexdigest()
        return record
