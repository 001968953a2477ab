"""The log of a run: one JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stages.checkpoint import replace_file
from stages.errors import CheckpointError


class StepLog:
    """Appends records that each have a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line. Raises CheckpointError when it cannot be written."""
        try:
            with self.path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror}; free some space and run again to go on"
            ) from None

    def flush(self) -> None:
        """Bring what was appended to the disk, so that a state saved after it never lacks its lines."""
        if self.path.exists():
            with self.path.open("rb") as log:
                os.fsync(log.fileno())

    def cut(self, step: int) -> None:
        """Forget what was logged after `step`, a final evaluation, and a line that a kill left half written."""
        kept = [r for r in read_records(self.path) if r["step"] <= step and not r.get("final")]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        replace_file(self.path, lambda path: path.write_text(text, encoding="utf-8"))


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a log; none if there is no log yet."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
