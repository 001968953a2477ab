"""The record of a detached lab: one JSON file in a directory that is the user's alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loadtest.wan.namespace import LabError
from serving.deployment import check_private

RECORD, LOCK, LOG = "wan.json", "wan.lock", "wan.log"


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Whole or not at all. Raises LabError when the disk is full."""
    unfinished = directory / f"{RECORD}.new"
    try:
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        unfinished.replace(directory / RECORD)
    except OSError as error:
        raise LabError(f"cannot write {directory / RECORD}: {error.strerror}") from None


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record, if there is one. Raises LabError when it is damaged, or others could have written it."""
    check_private(directory)
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise damaged(directory, error) from None
    if not isinstance(record, dict):
        raise damaged(directory, TypeError("not an object"))
    return record


def remove_record(directory: Path) -> None:
    (directory / RECORD).unlink(missing_ok=True)


def damaged(directory: Path, error: Exception) -> LabError:
    return LabError(
        f"{directory / RECORD} is damaged ({error}): remove it and end the processes `python -m loadtest.wan.process`"
    )


def prepare(directory: Path) -> None:
    """Make the directory. Raises ServiceError when that fails, or when it is not this user's alone."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"cannot make {directory}: {error.strerror}; name another in ONESWEEP_STATE") from None
    check_private(directory)
