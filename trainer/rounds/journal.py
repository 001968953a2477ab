"""An append-only log in which each line knows the digest of the line before: what was committed stays, in order."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from stages.errors import CheckpointError, ResumeError

BEFORE = "before"
FIRST = "0" * 64


class Journal:
    """A line counts once `append` has returned. One writer; see `trainer.lock`."""

    def __init__(self, path: Path) -> None:
        """Open or make it. Raises ResumeError where a line is not what was written, CheckpointError without access."""
        self.path = path
        self._broken = False
        try:
            _, self._size, self._last = read_journal(path)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, self._size)  # a kill in the middle of a line: it was never committed
            os.lseek(self._file, 0, os.SEEK_END)
            os.fsync(self._file)
            sync_directory(path.parent)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None

    def append(self, record: dict[str, Any]) -> None:
        """Raises CheckpointError, with nothing appended; when that cannot be made sure, nothing more is either."""
        if self._broken:
            raise CheckpointError(f"{self.path} could not be written before; start again to go on")
        line = json.dumps({BEFORE: self._last, **record}).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            # after a failed fsync nobody knows what is on the disk: only a new process that reads it does
            self._broken = True
            os.fsync(self._file)
            self._broken = False
        except OSError as error:
            self._take_back()
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}; free some space") from None
        self._size += len(line)
        self._last = _digest(line)

    def close(self) -> None:
        os.close(self._file)

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self._broken = True


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int, str]:
    """Records, bytes of the whole lines, digest of the last; a last line without its end does not count.

    Raises ResumeError where the chain is broken.
    """
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    records, last = [], FIRST
    for number, line in enumerate(whole.splitlines(keepends=True), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.pop(BEFORE, None) != last:
            raise ResumeError(f"line {number} of {path} is not what was written after the line before it")
        records.append(record)
        last = _digest(line)
    return records, len(whole), last


def sync_directory(path: Path) -> None:
    """Names of files made or replaced in a directory survive a power cut after this."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
