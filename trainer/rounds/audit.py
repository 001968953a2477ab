"""The proof that nothing was lost: every accepted update was merged once, or is still there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stages.errors import ResumeError
from trainer.rounds.disk import LOG, load_checked, update_path, version_path
from trainer.rounds.journal import read_journal
from trainer.rounds.store import Record


@dataclass
class Audit:
    """What a log says; `problems` has one sentence for each thing that should not be."""

    accepted: int = 0
    merged: int = 0
    pending: int = 0
    dropped: int = 0
    """Late, and worth nothing by rule."""
    versions: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def audit(directory: Path) -> Audit:
    """Read the log of a store, which no process needs to have open, and check it against the files."""
    found = Audit()
    if not (directory / LOG).exists():
        found.problems.append(f"{directory} has no {LOG}")
        return found
    try:
        records, _, _ = read_journal(directory / LOG)
    except ResumeError as error:
        found.problems.append(str(error))
        return found
    if not records or records[0].get("kind") != "run":
        found.problems.append("the log does not begin with its run")
        return found
    pending: dict[tuple[str, str], Record] = {}
    seen: set[tuple[str, str]] = set()
    newest = {part: (0, sha256) for part, sha256 in records[0]["stored"].items()}
    for record in records[1:]:
        if record["kind"] == "closed":
            _close(record, pending, newest, found)
            continue
        key = record["part"], record["id"]
        if key in seen:
            found.problems.append(f"{record['id']} of {record['part']} was taken twice")
        seen.add(key)
        if record["kind"] == "dropped":
            found.dropped += 1
        else:
            found.accepted += 1
            pending[key] = record
    found.pending = len(pending)
    found.versions = {part: number for part, (number, _) in newest.items()}
    for (part, name), record in pending.items():
        _check(update_path(directory, part, name), record["sha256"], found)
    for part, (number, sha256) in newest.items():
        _check(version_path(directory, part, number), sha256, found)
    return found


def _close(
    record: Record, pending: dict[tuple[str, str], Record], newest: dict[str, tuple[int, str]], found: Audit
) -> None:
    part, number = record["part"], record["round"]
    if number != newest[part][0]:
        found.problems.append(f"round {number} of {part} was closed when {newest[part][0]} was open")
    for name in record["updates"]:
        if pending.pop((part, name), None) is None:
            found.problems.append(f"round {number} of {part} merged {name}, which was not there to be merged")
        else:
            found.merged += 1
    newest[part] = number + 1, record["sha256"]


def _check(path: Path, sha256: str, found: Audit) -> None:
    try:
        load_checked(path, sha256)
    except ResumeError as error:
        found.problems.append(str(error))
