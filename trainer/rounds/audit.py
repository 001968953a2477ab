"""The audit: queries which show that every accepted update was merged or left out once, or is still there."""

# It shows faults, not what an attacker with access to the directory did.

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from stages.errors import ResumeError
from trainer.rounds.store import DATABASE, connect, load_checked, update_path, version_path

# Each row of a query is one thing that should not be. That nothing is taken or merged twice, the database holds itself.
RULES = {
    "round {} of {} merged {}, which was not there to be merged": """
        SELECT m.round, m.part, m.id FROM merges m
        JOIN events c ON c.kind = 'closed' AND c.part = m.part AND c.round = m.round
        LEFT JOIN events a ON a.kind = 'accepted' AND a.part = m.part AND a.id = m.id AND a.number < c.number
        WHERE a.number IS NULL""",
    "round {} of {} was closed without {}, which was there to be merged": """
        SELECT c.round, c.part, a.id FROM events c
        JOIN events a ON a.kind = 'accepted' AND a.part = c.part AND a.number < c.number AND a.round <= c.round
        LEFT JOIN merges m ON m.part = a.part AND m.id = a.id
        WHERE c.kind = 'closed' AND (m.round IS NULL OR m.round > c.round)""",
    "round {} of {} was closed after {} others": """
        SELECT round, part, before FROM (
            SELECT round, part, ROW_NUMBER() OVER (PARTITION BY part ORDER BY number) - 1 AS before
            FROM events WHERE kind = 'closed')
        WHERE round != before""",
    "{} of {} was dropped, and was not late": """
        SELECT d.id, d.part FROM events d
        LEFT JOIN events c ON c.kind = 'closed' AND c.part = d.part AND c.round = d.round AND c.number < d.number
        WHERE d.kind = 'dropped' AND c.number IS NULL""",
    "round {} of {} decided about {} against its score": """
        SELECT m.round, m.part, m.id FROM merges m
        JOIN events c ON c.kind = 'closed' AND c.part = m.part AND c.round = m.round
        JOIN events a ON a.kind = 'accepted' AND a.part = m.part AND a.id = m.id
        JOIN json_each(c.record, '$.scores') s ON s.key = json_extract(a.record, '$.voter')
        WHERE json_extract(s.value, '$.kept') != m.kept""",
}
COUNTS = {
    "accepted": "SELECT COUNT(*) FROM events WHERE kind = 'accepted'",
    "dropped": "SELECT COUNT(*) FROM events WHERE kind = 'dropped'",
    "merged": "SELECT COUNT(*) FROM merges WHERE kept",
    "left_out": "SELECT COUNT(*) FROM merges WHERE NOT kept",
}
PENDING = """
    SELECT a.part, a.id, json_extract(a.record, '$.sha256') FROM events a
    LEFT JOIN merges m ON m.part = a.part AND m.id = a.id
    WHERE a.kind = 'accepted' AND m.id IS NULL"""
NEWEST = """
    SELECT s.key, COALESCE(c.round + 1, 0), COALESCE(json_extract(c.record, '$.sha256'), s.value) FROM events r
    JOIN json_each(r.record, '$.stored') s
    LEFT JOIN events c ON c.number = (SELECT MAX(number) FROM events WHERE kind = 'closed' AND part = s.key)
    WHERE r.kind = 'run'"""


@dataclass
class Audit:
    """Counts of a run's events; `problems` has one sentence for each thing that should not be."""

    accepted: int = 0
    merged: int = 0
    pending: int = 0
    dropped: int = 0  # late, and worth nothing by rule
    left_out: int = 0  # of a merge, by their score on held-out text
    versions: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def audit(directory: Path) -> Audit:
    """Check the events of a store against each other and the files; a coordinator may have it open."""
    path = directory / DATABASE
    if not path.exists():
        return Audit(problems=[f"{directory} has no {DATABASE}: give the folder `rounds` of a coordinator's --out"])
    try:
        with closing(connect(path)) as database:
            while True:
                before = _last(database)
                found = _audit(database, directory)
                # files go when a running coordinator merges them: then there are more events, and all is read again
                if not found.problems or _last(database) == before:
                    return found
    except sqlite3.Error as error:
        return Audit(problems=[f"{path} is damaged: {error}"])


def _audit(database: sqlite3.Connection, directory: Path) -> Audit:
    pending, newest = database.execute(PENDING).fetchall(), database.execute(NEWEST).fetchall()
    found = Audit(
        **{name: database.execute(query).fetchone()[0] for name, query in COUNTS.items()},
        pending=len(pending),
        versions={part: number for part, number, _ in newest},
    )
    if not newest:
        found.problems.append(f"{DATABASE} does not begin with its run")
    damage = [row for row in database.execute("PRAGMA quick_check") if row != ("ok",)]
    found.problems += [f"{DATABASE} is damaged: {words}" for (words,) in damage]
    found.problems += [words.format(*row) for words, query in RULES.items() for row in database.execute(query)]
    files = [(update_path(directory, part, name), sha256) for part, name, sha256 in pending]
    for file, sha256 in [*files, *((version_path(directory, part, n), sha256) for part, n, sha256 in newest)]:
        try:
            load_checked(file, sha256)
        except ResumeError as error:
            found.problems.append(str(error))
    return found


def _last(database: sqlite3.Connection) -> int:
    """The number of events."""
    return int(database.execute("SELECT COUNT(*) FROM events").fetchone()[0])
