"""The durable store: a directory that can lose its process at any instruction.

    log.jsonl                       the journal: what is not in it did not happen
    updates/PART/ID.safetensors     accepted and not merged yet
    versions/PART/N.safetensors     weights, what the workers have, outer state; the last few

A file is whole before its record is committed, and goes after the record that makes it needless.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.checkpoint import replace_file
from stages.errors import CheckpointError, ResumeError
from trainer.lock import exclusive
from trainer.rounds.journal import Journal, read_journal, sync_directory
from trainer.rounds.store import Record, Version
from trainer.rounds.tensors import Tensors, digest
from trainer.rounds.update import Update

LOG, LOCK, UPDATES, VERSIONS, SUFFIX = "log.jsonl", "lock", "updates", "versions", ".safetensors"
WEIGHTS, PUBLIC, OUTER, DIFFERENCE = "weights.", "public.", "outer.", "difference"


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
            store.journal.close()


class DiskStore:
    """See trainer/rounds/store.py."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.journal = Journal(directory / LOG)
        self._lasting: set[Path] = set()
        """Folders that a power cut leaves where they are."""

    def records(self) -> Sequence[Record]:
        return read_journal(self.directory / LOG)[0]  # when a run begins; not kept, for it only grows

    def commit(self, record: Record) -> None:
        self.journal.append(record)

    def put_update(self, update: Update) -> str:
        return self._save(update_path(self.directory, update.part, update.id), update.delta)

    def get_update(self, part: str, name: str, sha256: str) -> Tensors:
        return load_checked(update_path(self.directory, part, name), sha256)

    def put_version(self, part: str, number: int, version: Version) -> str:
        tensors = _named(WEIGHTS, version.weights) | _named(OUTER, version.outer)
        if version.public is not version.weights:
            tensors |= _named(PUBLIC, version.public)
        if version.difference:
            tensors[DIFFERENCE] = torch.from_numpy(np.frombuffer(version.difference, np.uint8).copy())
        return self._save(version_path(self.directory, part, number), tensors)

    def get_version(self, part: str, number: int, sha256: str) -> Version:
        tensors = load_checked(version_path(self.directory, part, number), sha256)
        weights = _under(WEIGHTS, tensors)
        difference = tensors[DIFFERENCE].numpy().tobytes() if DIFFERENCE in tensors else b""
        return Version(weights, _under(PUBLIC, tensors) or weights, _under(OUTER, tensors), difference)

    def forget(self, part: str, updates: Sequence[str], before: int) -> None:
        for name in updates:
            _remove(update_path(self.directory, part, name))
        for path in (self.directory / VERSIONS / part).glob(f"*{SUFFIX}"):
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


def update_path(directory: Path, part: str, name: str) -> Path:
    return directory / UPDATES / part / f"{name}{SUFFIX}"


def version_path(directory: Path, part: str, number: int) -> Path:
    return directory / VERSIONS / part / f"{number}{SUFFIX}"


def load_checked(path: Path, sha256: str) -> Tensors:
    """Tensors whose digest is known. Raises ResumeError for others, or none."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ResumeError(f"{path} cannot be read ({error}), but the log counts on it") from None
    if digest(tensors) != sha256:
        raise ResumeError(f"{path} is not what the log says: its tensors have another SHA-256")
    return tensors


def _remove(path: Path) -> None:
    """What cannot be removed costs room and nothing else: no record counts on it, and the next start tries again."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _named(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
