"""Where the ledger's state is kept: the interface, and a store in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.rounds.tensors import Tensors, digest
from trainer.rounds.update import Update

Record = dict[str, Any]


@dataclass(frozen=True)
class Version:
    """All that the next merge of a part needs."""

    weights: Tensors = field(repr=False)
    """What the outer optimizer steps from, never rounded."""
    public: Tensors = field(repr=False)
    """What the workers have: the same, where new versions travel as `fp32`."""
    outer: Tensors = field(default_factory=dict, repr=False)
    """State of the outer optimizer."""
    difference: bytes = field(default=b"", repr=False)
    """From the public weights before, in the `down_codec`."""


class Store(Protocol):
    """A record counts once `commit` has returned; what was put before it and is in no record does not."""

    def records(self) -> Sequence[Record]:
        """All that was committed, in order. Raises ResumeError where it cannot be trusted."""
        ...

    def commit(self, record: Record) -> None:
        """Raises CheckpointError, with nothing committed."""
        ...

    def put_update(self, update: Update) -> str:
        """Keep the pseudo-gradient; returns its digest. Raises CheckpointError."""
        ...

    def get_update(self, part: str, name: str, sha256: str) -> Tensors:
        """The pseudo-gradient of an update by its id. Raises ResumeError where it is not what was put."""
        ...

    def put_version(self, part: str, number: int, version: Version) -> str:
        """Returns its digest. Raises CheckpointError."""
        ...

    def get_version(self, part: str, number: int, sha256: str) -> Version:
        """Raises ResumeError where it is not what was put."""
        ...

    def forget(self, part: str, updates: Sequence[str], before: int) -> None:
        """These updates, and versions below `before`, are no longer needed."""
        ...

    def retain(self, updates: Collection[tuple[str, str]], versions: Collection[tuple[str, int]]) -> None:
        """Nothing but these, by part and id or number, is needed: a kill may have left more."""
        ...


class MemoryStore:
    """For runs that nobody resumes."""

    def __init__(self) -> None:
        self.log: list[Record] = []
        self.updates: dict[tuple[str, str], Tensors] = {}
        self.versions: dict[tuple[str, int], Version] = {}

    def records(self) -> Sequence[Record]:
        return self.log

    def commit(self, record: Record) -> None:
        self.log.append(record)

    def put_update(self, update: Update) -> str:
        self.updates[update.part, update.id] = update.delta
        return digest(update.delta)

    def get_update(self, part: str, name: str, sha256: str) -> Tensors:
        return self.updates[part, name]

    def put_version(self, part: str, number: int, version: Version) -> str:
        self.versions[part, number] = version
        return digest(version.weights)

    def get_version(self, part: str, number: int, sha256: str) -> Version:
        return self.versions[part, number]

    def forget(self, part: str, updates: Sequence[str], before: int) -> None:
        for name in updates:
            del self.updates[part, name]
        for key in [key for key in self.versions if key[0] == part and key[1] < before]:
            del self.versions[key]

    def retain(self, updates: Collection[tuple[str, str]], versions: Collection[tuple[str, int]]) -> None:
        self.updates = {key: delta for key, delta in self.updates.items() if key in updates}
        self.versions = {key: version for key, version in self.versions.items() if key in versions}
