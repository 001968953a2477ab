"""A training as it is seen from outside: its coordinator's events and its status."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from stages.errors import ServiceError
from trainer.v1.rounds_pb2 import WatchUpdate

READ_S = 10.0  # how long who reads events waits for who writes them
AGAIN_S = 0.5  # between two tries to reach a coordinator


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

    def closed(self, part: str) -> int:
        """Rounds of a part that were closed."""
        return sum(entry.kind == "closed" and entry.part == part for entry in self.entries)


def parse_update(line: str) -> WatchUpdate:
    """The run at one moment, from a line of `onesweep train status --json`: what is 0, false or empty may be missing.

    Raises ValueError or ParseError for another line.
    """
    record = json.loads(line, parse_constant=str)  # protobuf wants NaN and infinities in quotes
    return ParseDict(record, WatchUpdate(), ignore_unknown_fields=True)


class RunWatcher:
    """Keeps the last status of a run, and asks again when its coordinator was away.

    Runs `onesweep train status --json` beside the coordinator until it is closed.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.last: WatchUpdate | None = None
        self._command, self._log = command, log
        self._closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():  # it may just be starting another
            if self._process is not None:
                self._process.kill()
            self._thread.join(AGAIN_S)

    def _look(self) -> None:
        while not self._closed.is_set():
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            with self._process as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if self._closed.is_set():
                        break
                    with contextlib.suppress(ValueError, ParseError):  # a line that its end cut off
                        self.last = parse_update(line)
                process.kill()
            self._closed.wait(AGAIN_S)
