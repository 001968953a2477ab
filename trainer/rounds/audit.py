"""The proof that nothing was lost: every accepted update was merged once, or is still there."""

# It is a proof against faults, not against an attacker with access to the directory: the log's chain has no secret.

from dataclasses import dataclass, field
from pathlib import Path

from onesweep.stages.errors import ResumeError
from onesweep.trainer.rounds.store import LOG, Record, load_checked, read_log, update_path, version_path


@dataclass
class Audit:
    """The contents of a log; `problems` has one sentence for each thing that should not be."""

    accepted: int = 0
    merged: int = 0
    pending: int = 0
    dropped: int = 0  # late, and worth nothing by rule
    left_out: int = 0  # of a merge, by their score on held-out text
    versions: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def audit(directory: Path) -> Audit:
    """Read the log of a store, which no process needs to have open, and check it against the files."""
    log = directory / LOG
    if not log.exists():
        return Audit(problems=[f"{directory} has no {LOG}: give the folder `rounds` of a coordinator's --out"])
    while True:
        try:
            records, size, _ = read_log(log)
        except ResumeError as error:
            return Audit(problems=[str(error)])
        reader = _Reader(directory)
        found = reader.read(records)
        # files go when a running coordinator merges them: then the log has grown, and says so
        if not found.problems or read_log(log)[1] == size:
            return found


class _Reader:
    """Follows a log, record by record."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.found, self.line = directory, Audit(), 1
        self.pending: dict[tuple[str, str], Record] = {}
        self.seen: set[tuple[str, str]] = set()
        self.handed_in: set[tuple[str, str, int]] = set()
        self.newest: dict[str, tuple[int, str]] = {}

    def read(self, records: list[Record]) -> Audit:
        """Follow the records, up to one that makes no sense: nothing is known of those after it."""
        if not records or records[0].get("kind") != "run":
            self._wrong("the log does not begin with its run")
            return self.found
        try:
            self.newest = {part: (0, sha256) for part, sha256 in records[0]["stored"].items()}
            for self.line, record in enumerate(records[1:], 2):
                self._follow(record)
            self._check_files()
        except (KeyError, TypeError, ValueError, AttributeError):
            self._wrong(f"line {self.line} of the log is no record of this run")
        self.found.pending = len(self.pending)
        self.found.versions = {part: version for part, (version, _) in self.newest.items()}
        return self.found

    def _follow(self, record: Record) -> None:
        match record["kind"]:
            case "accepted":
                self._take(record)
                self.pending[record["part"], record["id"]] = record
                self.found.accepted += 1
            case "dropped":
                self._take(record)
                if record["round"] >= self.newest[record["part"]][0]:
                    self._wrong(f"{record['id']} of {record['part']} was dropped, and was not late")
                self.found.dropped += 1
            case "closed":
                self._close(record)
            case kind:
                raise ValueError(kind)

    def _take(self, record: Record) -> None:
        part, name, worker, round_ = record["part"], record["id"], record["worker"], record["round"]
        if (part, name) in self.seen:
            self._wrong(f"{name} of {part} was taken twice")
        if (part, worker, round_) in self.handed_in:
            self._wrong(f"{worker} handed in twice for round {round_} of {part}")
        self.seen.add((part, name))
        self.handed_in.add((part, worker, round_))

    def _close(self, record: Record) -> None:
        part, number = record["part"], record["round"]
        if number != self.newest[part][0]:
            self._wrong(f"round {number} of {part} was closed when {self.newest[part][0]} was open")
        for merged, names in ((True, record["updates"]), (False, record.get("left_out", ()))):
            for name in names:
                if (update := self.pending.pop((part, name), None)) is None:
                    self._wrong(f"round {number} of {part} merged {name}, which was not there to be merged")
                    continue
                if ("scores" not in record or record["scores"][update["voter"]]["kept"]) is not merged:
                    self._wrong(
                        f"round {number} of {part} {'merged' if merged else 'left out'} {name} against its score"
                    )
                self.found.merged += merged
                self.found.left_out += not merged
        for (other, name), left in self.pending.items():
            if other == part and left["round"] <= number:
                self._wrong(f"round {number} of {part} was closed without {name}, which was there to be merged")
        self.newest[part] = number + 1, record["sha256"]

    def _check_files(self) -> None:
        for (part, name), record in self.pending.items():
            self._check(update_path(self.directory, part, name), record["sha256"])
        for part, (number, sha256) in self.newest.items():
            self._check(version_path(self.directory, part, number), sha256)

    def _check(self, path: Path, sha256: str) -> None:
        try:
            load_checked(path, sha256)
        except ResumeError as error:
            self._wrong(str(error))

    def _wrong(self, sentence: str) -> None:
        self.found.problems.append(sentence)
