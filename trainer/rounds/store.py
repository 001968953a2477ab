"""Stores of a ledger's state: in memory, and on a disk whose process can die at any instruction."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from onesweep.stages.checkpoint.checkpoint import replace_file
from onesweep.stages.errors import CheckpointError, ResumeError
from onesweep.trainer.blocks.state import digest, exclusive
from onesweep.trainer.rounds.codecs import Tensors, under

LOG, LOCK, UPDATES, VERSIONS, SUFFIX = "log.jsonl", "lock", "updates", "versions", ".safetensors"
WEIGHTS, PUBLIC, OUTER, DIFFERENCE = "weights.", "public.", "outer.", "difference"
BEFORE = "before"
FIRST = "0" * 64
RESTORE = "put a copy of the whole directory back, or begin anew with another --out"

Record = dict[str, Any]  # one event of the log; its key "part" names a fragment


@dataclass(frozen=True)
class Update:
    """The pseudo-gradient of one worker for one round of one fragment (DiLoCo, arXiv 2311.08105)."""

    id: str  # idempotency key: the same update sent again has the same
    worker: str
    fragment: str
    base_version: int  # version of the fragment that the worker started from
    round: int  # the round that was open when it started; below that when it comes, the update is late
    steps: int  # local steps done: the weight in a merge
    sequences: int  # windows of text seen
    delta: Tensors = field(repr=False)  # base - trained, so that plain SGD with rate 1 goes where the worker went
    losses: Mapping[str, float] = field(default_factory=dict)  # of the last step, in nats; kept for status pages
    voter: str = ""  # the key or place that it came from, which has one vote in a merge; empty: the worker


@dataclass(frozen=True)
class Share:
    """The part of one update in a merge."""

    weight: float
    delta: Tensors = field(repr=False)


@dataclass(frozen=True)
class Version:
    """All that the next merge of a fragment needs."""

    weights: Tensors = field(repr=False)  # the weights that the outer optimizer steps from, never rounded
    public: Tensors = field(repr=False)  # the weights that workers have: the same, where new versions travel as `fp32`
    outer: Tensors = field(default_factory=dict, repr=False)  # state of the outer optimizer
    difference: bytes = field(default=b"", repr=False)  # from the public weights before, in the `down_codec`


class Store:
    """A ledger's state in memory, for runs that are never resumed.

    A record counts once `commit` has returned; anything put before it that is in no record does not.
    """

    def __init__(self) -> None:
        self.log: list[Record] = []
        self.updates: dict[tuple[str, str], Tensors] = {}
        self.versions: dict[tuple[str, int], Version] = {}

    def records(self) -> Sequence[Record]:
        """All that was committed, in order. Raises ResumeError where it cannot be trusted."""
        return self.log

    def commit(self, record: Record) -> None:
        """Raises CheckpointError, with nothing committed."""
        self.log.append(record)

    def put_update(self, update: Update) -> str:
        """Keep the pseudo-gradient; returns its digest. Raises CheckpointError."""
        self.updates[update.fragment, update.id] = update.delta
        return digest(update.delta)

    def get_update(self, fragment: str, name: str, sha256: str) -> Tensors:
        """The pseudo-gradient of an update by its id. Raises ResumeError where it is not what was put."""
        return self.updates[fragment, name]

    def put_version(self, fragment: str, number: int, version: Version) -> str:
        """Returns its digest. Raises CheckpointError."""
        self.versions[fragment, number] = version
        return digest(version.weights)

    def get_version(self, fragment: str, number: int, sha256: str) -> Version:
        """Raises ResumeError where it is not what was put."""
        return self.versions[fragment, number]

    def forget(self, fragment: str, updates: Sequence[str], before: int) -> None:
        """Drop these updates, and versions below `before`."""
        for name in updates:
            del self.updates[fragment, name]
        for key in [key for key in self.versions if key[0] == fragment and key[1] < before]:
            del self.versions[key]

    def retain(self, updates: Collection[tuple[str, str]], versions: Collection[tuple[str, int]]) -> None:
        """Drop everything but these, by fragment and id or number: a kill may have left more."""


@contextmanager
def open_store(directory: Path) -> Iterator[DiskStore]:
    """The store in `directory`, made if it is not there, for this process alone.

    Raises ResumeError while another has it, or where its log cannot be trusted; CheckpointError without access.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(directory.parent)
        (directory / LOCK).open("a").close()
    except OSError as error:
        raise CheckpointError(f"cannot keep rounds in {directory}: {error.strerror}") from None
    with exclusive(directory / LOCK, f"another process keeps the rounds in {directory}"):
        store = DiskStore(directory)
        try:
            yield store
        finally:
            store.commits.close()


class DiskStore(Store):
    """The same in a directory, whose process can die at any instruction:

    log.jsonl                           the log: what is not in it did not happen
    updates/FRAGMENT/ID.safetensors     accepted and not merged yet
    versions/FRAGMENT/N.safetensors     weights, public weights, outer state; the last few
    """

    # A file is whole before its record is committed, and is removed after the record that makes it needless.

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commits = CommitLog(directory / LOG)
        # Folders that a power cut leaves where they are.
        self._lasting: set[Path] = set()

    def records(self) -> Sequence[Record]:
        return read_log(self.directory / LOG)[0]  # read when a run begins; not kept, for it only grows

    def commit(self, record: Record) -> None:
        self.commits.append(record)

    def put_update(self, update: Update) -> str:
        return self._save(update_path(self.directory, update.fragment, update.id), update.delta)

    def get_update(self, fragment: str, name: str, sha256: str) -> Tensors:
        return load_checked(update_path(self.directory, fragment, name), sha256)

    def put_version(self, fragment: str, number: int, version: Version) -> str:
        tensors = _named(WEIGHTS, version.weights) | _named(OUTER, version.outer)
        if version.public is not version.weights:
            tensors |= _named(PUBLIC, version.public)
        if version.difference:
            tensors[DIFFERENCE] = torch.from_numpy(np.frombuffer(version.difference, np.uint8).copy())
        return self._save(version_path(self.directory, fragment, number), tensors)

    def get_version(self, fragment: str, number: int, sha256: str) -> Version:
        tensors = load_checked(version_path(self.directory, fragment, number), sha256)
        weights = under(WEIGHTS, tensors)
        difference = tensors[DIFFERENCE].numpy().tobytes() if DIFFERENCE in tensors else b""
        return Version(weights, under(PUBLIC, tensors) or weights, under(OUTER, tensors), difference)

    def forget(self, fragment: str, updates: Sequence[str], before: int) -> None:
        for name in updates:
            _remove(update_path(self.directory, fragment, name))
        for path in (self.directory / VERSIONS / fragment).glob(f"*{SUFFIX}"):
            if not path.stem.isdecimal() or int(path.stem) < before:
                _remove(path)

    def retain(self, updates: Collection[tuple[str, str]], versions: Collection[tuple[str, int]]) -> None:
        needed = {update_path(self.directory, *key) for key in updates}
        needed |= {version_path(self.directory, *key) for key in versions}
        for folder in (UPDATES, VERSIONS):
            for path in (self.directory / folder).glob("*/*"):
                if path not in needed:
                    _remove(path)

    def _save(self, path: Path, tensors: Tensors) -> str:
        """Durable under its name when it returns."""
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda temporary: save_file(tensors, temporary))
            sync_directory(folder)
            if folder not in self._lasting:
                for above in (folder.parent, self.directory):
                    sync_directory(above)
                self._lasting.add(folder)
        except OSError as error:
            raise CheckpointError(f"cannot save {path}: {error.strerror}; free some space") from None
        return digest(tensors)


class CommitLog:
    """An append-only file; each line has the digest of the line before, so that no committed line can be lost.

    A line counts once `append` has returned. One writer.
    """

    def __init__(self, path: Path) -> None:
        """Open or make it. Raises ResumeError where a line is not what was written, CheckpointError without access."""
        self.path = path
        self._broken = False
        try:
            _, self._size, self._last = read_log(path)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, self._size)  # a kill in the middle of a line: it was never committed
            os.lseek(self._file, 0, os.SEEK_END)
            os.fsync(self._file)
            sync_directory(path.parent)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from None

    def append(self, record: Record) -> None:
        """Raises CheckpointError, with nothing appended; when that cannot be made sure, nothing more is either."""
        if self._broken:
            raise CheckpointError(f"{self.path} could not be written before; start again to go on")
        line = json.dumps({BEFORE: self._last, **record}).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            # after a failed fsync only a new process that reads the disk knows what is on it
            self._broken = True
            os.fsync(self._file)
            self._broken = False
        except OSError as error:
            self._take_back()
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}; free some space") from None
        self._size += len(line)
        self._last = hashlib.sha256(line).hexdigest()

    def close(self) -> None:
        os.close(self._file)

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self._broken = True


def read_log(path: Path) -> tuple[list[Record], int, str]:
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
            raise ResumeError(f"line {number} of {path} is not what was written after the line before it; {RESTORE}")
        records.append(record)
        last = hashlib.sha256(line).hexdigest()
    return records, len(whole), last


def update_path(directory: Path, fragment: str, name: str) -> Path:
    return directory / UPDATES / fragment / f"{name}{SUFFIX}"


def version_path(directory: Path, fragment: str, number: int) -> Path:
    return directory / VERSIONS / fragment / f"{number}{SUFFIX}"


def load_checked(path: Path, sha256: str) -> Tensors:
    """Tensors whose digest is known. Raises ResumeError for others, or none."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ResumeError(f"{path} cannot be read ({error}), but the log counts on it; {RESTORE}") from None
    if digest(tensors) != sha256:
        raise ResumeError(f"{path} is not what the log says: its tensors have another SHA-256; {RESTORE}")
    return tensors


def sync_directory(path: Path) -> None:
    """Names of files made or replaced in a directory survive a power cut after this."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """No error if it stays: no record counts on it, it costs room only, and the next start tries again."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _named(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
