"""Files that results go to: found writable before a run, not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stages.errors import InputError, OnesweepError


def check_destination(path: Path, flag: str = "--json") -> None:
    """Raises InputError when `path` cannot be written; leaves no file behind."""
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another {flag} FILE") from None


def write_destination(path: Path, text: str) -> None:
    """Raises OnesweepError when the disk is full or the folder has gone meanwhile."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OnesweepError(f"cannot write {path}: {error.strerror}; the figures above are complete") from None
