"""Where figures go besides the terminal: found writable before a run, not after it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

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


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Raises OnesweepError when the disk is full or the folder has gone meanwhile."""
    try:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OnesweepError(f"cannot write {path}: {error.strerror}; the figures above are complete") from None
