"""The store of a ledger's state, on disk or in memory, and its audit."""

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stages.checkpoint.files import replace_file, sync
from stages.errors import CheckpointError, InputError, ResumeError, file_errors, regular
from stages.wire.secret_files import exclusive
from trainer.blocks.state import digest, strip_prefix
from trainer.rounds.codecs import Tensors

DATABASE, LOCK, UPDATES, VERSIONS, SUFFIX = "rounds.sqlite3", "lock", "updates", "versions", ".safetensors"
WEIGHTS, PUBLIC, OUTER, DIFFERENCE = "weights.", "public.", "outer.", "difference"
RESTORE = "restore a copy of the whole directory, or start over with another --out"
EVENTS = "SELECT record FROM events ORDER BY number"
BUSY_S = 60.0  # how long a writer waits for a reader
# An update is accepted once, a worker hands in once per round, a round closes once, and an update is merged or left
# out once: the database itself enforces this.
SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, part TEXT, id TEXT, worker TEXT, round INTEGER, record TEXT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS one_run ON events (kind) WHERE kind = 'run';
CREATE UNIQUE INDEX IF NOT EXISTS taken_once ON events (part, id) WHERE kind IN ('accepted', 'dropped');
CREATE UNIQUE INDEX IF NOT EXISTS one_a_round ON events (part, worker, round) WHERE kind IN ('accepted', 'dropped');
CREATE UNIQUE INDEX IF NOT EXISTS closed_once ON events (part, round) WHERE kind = 'closed';
CREATE TABLE IF NOT EXISTS merges (
    part TEXT, id TEXT, round INTEGER NOT NULL, kept INTEGER NOT NULL, PRIMARY KEY (part, id)
);
CREATE TABLE IF NOT EXISTS members (part INTEGER, replica INTEGER, record TEXT NOT NULL, PRIMARY KEY (part, replica));
"""

Record = dict[str, Any]  # one event of the log


@dataclass(frozen=True)
class Update:
    """The pseudo-gradient of one worker for one round of one part (DiLoCo, arXiv 2311.08105)."""

    id: str  # idempotency key: a resent update has the same id
    worker: str
    part: str
    base_version: int  # version of the part that the worker started from
    round: int  # the round open at its start; the update is late if a later round is open when it arrives
    steps: int  # local steps done: the weight in a merge
    sequences: int  # windows of text seen
    delta: Tensors = field(repr=False)  # base - trained, so that plain SGD with rate 1 goes where the worker went
    losses: Mapping[str, float] = field(default_factory=dict)  # of the last step, in nats; kept for status pages
    voter: str = ""  # the key or place of its sender, with one vote in a merge; empty: the worker


@dataclass(frozen=True)
class Share:
    """One update's contribution to a merge."""

    weight: float
    delta: Tensors = field(repr=False)


@dataclass(frozen=True)
class Version:
    """Everything that the next merge of a part needs."""

    weights: Tensors = field(repr=False)  # start of the outer optimizer's step, never rounded
    public: Tensors = field(repr=False)  # the workers' weights: the same if new versions travel as `fp32`
    outer: Tensors = field(default_factory=dict, repr=False)  # state of the outer optimizer
    difference: bytes = field(default=b"", repr=False)  # from the previous public weights, in the `down_codec`


class Store:
    """A run's state in a directory, safe if the process dies at any instruction:

    rounds.sqlite3                      events and places: anything not in it did not happen
    updates/PART/ID.safetensors     accepted and not merged yet
    versions/PART/N.safetensors     weights, public weights, outer state; the last few

    or in memory, for runs that are never resumed. Reading raises ResumeError for anything other than what was stored;
    writing raises CheckpointError and then changes nothing.
    """

    # A file is complete before its event is committed, and is removed after the event that makes it unnecessary.

    def __init__(self, directory: Path | None = None) -> None:
        self.directory, self.path = directory or Path(), directory / DATABASE if directory else Path(":memory:")
        self._held: dict[Path, Tensors] | None = None if directory else {}
        # Folders that survive a power cut.
        self._lasting: set[Path] = set()
        try:
            self.database = connect(self.path)
            self.database.execute("PRAGMA journal_mode = WAL")
            # a commit is on disk when it returns; by default SQLite syncs only at checkpoints
            self.database.execute("PRAGMA synchronous = FULL")
            self.database.executescript(SCHEMA)
        except sqlite3.OperationalError as error:
            raise CheckpointError(f"cannot write {self.path}: {error}; check that its disk has space") from None
        except sqlite3.DatabaseError as error:
            raise ResumeError(f"{self.path} is damaged ({error}); {RESTORE}") from None

    def records(self) -> Sequence[Record]:
        """All committed events, in order. Raises ResumeError if a run has lost all of them."""
        found = read_events(self.database)  # read at a run's start; not kept, because they only grow
        # a fresh run would drop the files of lost events; a kill before the first event leaves only versions 0
        if not found and self._held is None and any((self.directory / VERSIONS).glob(f"*/[1-9]*{SUFFIX}")):
            raise ResumeError(f"{self.path} has no events, but next to it are versions of a run; {RESTORE}")
        return found

    def commit(self, record: Record) -> None:
        """Make an event count, together with the files stored for it."""
        columns = [record.get(name) for name in ("kind", "part", "id", "worker", "round")]
        merged = [
            (record["part"], name, record["round"], kept)
            for kept, key in ((1, "updates"), (0, "left_out"))
            for name in record.get(key, ())
        ]
        with self._transaction() as database:
            insert = "INSERT INTO events (kind, part, id, worker, round, record) VALUES (?, ?, ?, ?, ?, ?)"
            database.execute(insert, (*columns, json.dumps(record)))
            database.executemany("INSERT INTO merges VALUES (?, ?, ?, ?)", merged)

    def members(self) -> Sequence[Record]:
        """The saved places."""
        return read_events(self.database, "SELECT record FROM members")

    def save_members(self, records: Sequence[Record]) -> None:
        """Replace all saved places."""
        rows = [(record["part"], record["replica"], json.dumps(record)) for record in records]
        with self._transaction() as database:
            database.execute("DELETE FROM members")
            database.executemany("INSERT INTO members VALUES (?, ?, ?)", rows)

    def put_update(self, update: Update) -> str:
        """Store the pseudo-gradient; returns its digest."""
        return self._save(tensors_path(self.directory, UPDATES, update.part, update.id), update.delta)

    def get_update(self, part: str, name: str, sha256: str) -> Tensors:
        """The pseudo-gradient of an update by its id."""
        return self._load(tensors_path(self.directory, UPDATES, part, name), sha256)

    def put_version(self, part: str, number: int, version: Version) -> str:
        """Store a version; returns its digest."""
        tensors = _named(WEIGHTS, version.weights) | _named(OUTER, version.outer)
        if version.public is not version.weights:
            tensors |= _named(PUBLIC, version.public)
        if version.difference:
            tensors[DIFFERENCE] = torch.from_numpy(np.frombuffer(version.difference, np.uint8).copy())
        return self._save(tensors_path(self.directory, VERSIONS, part, number), tensors)

    def get_version(self, part: str, number: int, sha256: str) -> Version:
        tensors = self._load(tensors_path(self.directory, VERSIONS, part, number), sha256)
        weights = strip_prefix(WEIGHTS, tensors)
        difference = tensors[DIFFERENCE].numpy().tobytes() if DIFFERENCE in tensors else b""
        return Version(weights, strip_prefix(PUBLIC, tensors) or weights, strip_prefix(OUTER, tensors), difference)

    def forget(self, part: str, updates: Sequence[str], before: int) -> None:
        """Drop these updates, and versions below `before`."""
        old = [tensors_path(self.directory, UPDATES, part, name) for name in updates]
        versions = self.directory / VERSIONS / part
        found = versions.glob(f"*{SUFFIX}") if self._held is None else [p for p in self._held if p.parent == versions]
        old += [path for path in found if not path.stem.isdecimal() or int(path.stem) < before]
        for path in old:
            self._remove(path)

    def retain(self, updates: Collection[tuple[str, str]], versions: Collection[tuple[str, int]]) -> None:
        """Drop every file except these, by part and id or number: a kill may have left more."""
        needed = {tensors_path(self.directory, UPDATES, *key) for key in updates}
        needed |= {tensors_path(self.directory, VERSIONS, *key) for key in versions}
        for folder in (UPDATES, VERSIONS):
            for path in (self.directory / folder).glob("*/*"):
                if path not in needed:
                    self._remove(path)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all of the block's changes to disk, or none."""
        try:
            with self.database as database:
                yield database
        except sqlite3.Error as error:
            raise CheckpointError(f"cannot write {self.path}: {error}; free some space") from None

    def _save(self, path: Path, tensors: Tensors) -> str:
        """Save tensors, durably when it returns; returns the digest."""
        folder = path.parent
        if self._held is not None:
            self._held[path] = tensors
            return digest(tensors)
        with file_errors(CheckpointError, f"cannot save {path}", "free some space"):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda temporary: save_file(tensors, temporary))
            sync(folder)
            if folder not in self._lasting:
                for above in (folder.parent, self.directory):
                    sync(above)
                self._lasting.add(folder)
        return digest(tensors)

    def _load(self, path: Path, sha256: str) -> Tensors:
        return load_checked(path, sha256) if self._held is None else self._held[path]

    def _remove(self, path: Path) -> None:
        """Remove a file; no error if it stays: no event needs it, it only uses space, and the next start retries."""
        if self._held is not None:
            del self._held[path]
            return
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def open_store(directory: Path) -> Iterator[Store]:
    """The store in `directory`, created if it is not there, locked for this process.

    Raises ResumeError while another process has it or if it is damaged; OnesweepError without access.
    """
    with file_errors(InputError, f"cannot store rounds in {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        sync(directory.parent)
    with exclusive(directory / LOCK, ResumeError(f"another process is using the rounds in {directory}: stop it first")):
        store = Store(directory)
        try:
            yield store
        finally:
            store.database.close()


def connect(path: Path) -> sqlite3.Connection:
    """A connection for any thread, one at a time. Raises sqlite3.Error, CheckpointError."""
    return sqlite3.connect(regular(path), timeout=BUSY_S, check_same_thread=False)


def read_events(database: sqlite3.Connection, query: str = EVENTS) -> list[Record]:
    """All events in order, or the records that another query finds. Raises ResumeError if they cannot be read."""
    try:
        return [dict(json.loads(text)) for (text,) in database.execute(query)]
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise ResumeError(f"cannot read {DATABASE} ({error}); {RESTORE}") from None


def tensors_path(directory: Path, folder: str, part: str, name: str | int) -> Path:
    """:param name: the id of an update, or the number of a version."""
    return directory / folder / part / f"{name}{SUFFIX}"


def load_checked(path: Path, sha256: str) -> Tensors:
    """Load tensors with a known digest. Raises ResumeError if they differ or are missing."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ResumeError(f"cannot read {path} ({error}), which {DATABASE} needs; {RESTORE}") from None
    if digest(tensors) != sha256:
        raise ResumeError(f"{path} does not match {DATABASE}: its tensors have another SHA-256; {RESTORE}")
    return tensors


def _named(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}


# The audit finds faults, not the work of an attacker with access to the directory. Each row of a query is one fault.
# The database itself ensures that nothing is accepted or merged twice.
RULES = {
    "round {} of {} merged {}, which had not been accepted": """
        SELECT m.round, m.part, m.id FROM merges m
        JOIN events c ON c.kind = 'closed' AND c.part = m.part AND c.round = m.round
        LEFT JOIN events a ON a.kind = 'accepted' AND a.part = m.part AND a.id = m.id AND a.number < c.number
        WHERE a.number IS NULL""",
    "round {} of {} was closed without {}, which had been accepted": """
        SELECT c.round, c.part, a.id FROM events c
        JOIN events a ON a.kind = 'accepted' AND a.part = c.part AND a.number < c.number AND a.round <= c.round
        LEFT JOIN merges m ON m.part = a.part AND m.id = a.id
        WHERE c.kind = 'closed' AND (m.round IS NULL OR m.round > c.round)""",
    "round {} of {} was closed when round {} was due": """
        SELECT round, part, before FROM (
            SELECT round, part, ROW_NUMBER() OVER (PARTITION BY part ORDER BY number) - 1 AS before
            FROM events WHERE kind = 'closed')
        WHERE round != before""",
    "{} of {} was dropped although it was not late": """
        SELECT d.id, d.part FROM events d
        LEFT JOIN events c ON c.kind = 'closed' AND c.part = d.part AND c.round = d.round AND c.number < d.number
        WHERE d.kind = 'dropped' AND c.number IS NULL""",
    "round {} of {} contradicts the score of {}": """
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
    """Counts of a run's events; `problems` has one sentence per fault."""

    accepted: int = 0
    merged: int = 0
    pending: int = 0
    dropped: int = 0  # late, and worthless by rule
    left_out: int = 0  # of a merge, because of their score on held-out text
    versions: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        left_out = f"; {self.left_out} left out because of the score" if self.left_out else ""
        counts = f"{self.accepted} updates accepted: {self.merged} merged, {self.pending} pending; {self.dropped} late"
        versions = ", ".join(f"{part} at version {number}" for part, number in self.versions.items())
        return f"{counts} and dropped{left_out}{'; ' if versions else ''}{versions}"


def audit(directory: Path) -> Audit:
    """Check a store's events against each other and the files; a coordinator may have it open. Raises InputError if
    there is none."""
    path = directory / DATABASE
    with file_errors(InputError, f"cannot read {path}"):
        if not path.exists():
            raise InputError(f"{directory} has no {DATABASE}: give the folder `rounds` of a coordinator's --out")
    try:
        with closing(connect(path)) as database:
            while True:
                before = _last(database)
                found = _audit(database, directory)
                # a running coordinator removes files as it merges them: if there are new events, read everything again
                if not found.problems or _last(database) == before:
                    return found
    except sqlite3.Error as error:
        if error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):  # reading needs a lock
            raise InputError(f"cannot read {path}: {error}; run this as the user of the coordinator") from None
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
    # a damaged row may have no part
    files = [(tensors_path(directory, UPDATES, f"{part}", name), sha256) for part, name, sha256 in pending]
    for file, sha256 in [*files, *((tensors_path(directory, VERSIONS, part, n), sha256) for part, n, sha256 in newest)]:
        try:
            load_checked(file, sha256)
        except ResumeError as error:
            found.problems.append(str(error))
    return found


def _last(database: sqlite3.Connection) -> int:
    """The number of events."""
    return int(database.execute("SELECT COUNT(*) FROM events").fetchone()[0])
