"""A training as it is seen from outside: its coordinator's events and places."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import ServiceError

READ_S = 10.0  # how long who reads events waits for who writes them


@dataclass(frozen=True)
class LogEntry:
    """One event: the run, an update that was `accepted` or `dropped`, or a round that was `closed`."""

    at_s: float  # when it was first seen, seconds of the monotonic clock
    record: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.record["kind"])

    @property
    def part(self) -> str:
        return str(self.record.get("part", ""))


class EventFollower:
    """The events of a run's rounds, read while the coordinator writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[LogEntry] = []

    def look(self) -> list[LogEntry]:
        """The events since the last look. Raises ServiceError where one that was there has gone."""
        if not self.path.exists():
            return []
        known, now = len(self.entries), time.monotonic()
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=READ_S)) as database:
                count = database.execute("SELECT COUNT(*) FROM events").fetchone()[0]
                query = "SELECT record FROM events ORDER BY number LIMIT -1 OFFSET ?"
                new = [LogEntry(now, json.loads(text)) for (text,) in database.execute(query, (known,))]
        except sqlite3.OperationalError:  # it is just being made, or the disk has no room for who reads
            return []
        if count < known:
            raise ServiceError(f"{self.path} has {count} events, and had {known}")
        self.entries += new
        return new

    def replica(self, worker: str) -> int | None:
        """Its place; None before it has one."""
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(self.path)) as database:
            for (text,) in database.execute("SELECT record FROM members"):
                if (record := json.loads(text))["worker"] == worker:
                    return int(record["replica"])
        return None

    def closed(self, part: str) -> int:
        """Rounds of a part that were closed."""
        return sum(entry.kind == "closed" and entry.part == part for entry in self.entries)
