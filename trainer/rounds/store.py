"""Where the ledger's state is kept: an interface, and the one in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.rounds.tensors import Tensors
from trainer.rounds.update import Update


@dataclass(frozen=True)
class Version:
    """All that the next merge of a part needs."""

    weights: Tensors = field(repr=False)
    """Float32, never rounded: what the outer optimizer steps from."""
    public: Tensors = field(repr=False)
    """What the workers have: the same, where new versions travel as `fp32`."""
    outer: Tensors = field(repr=False)
    difference: bytes = field(default=b"", repr=False)


class Store(Protocol):
    """A record counts once `commit` has returned; what was put before it and has no record does not."""

    def records(self) -> list[dict[str, Any]]:
        """All that was committed, in order."""
        ...

    def commit(self, record: dict[str, Any]) -> None: ...

    def put_update(self, update: Update) -> None: ...

    def get_update(self, record: dict[str, Any]) -> Update:
        """The update of an `accepted` record."""
        ...

    def put_version(self, part: str, number: int, version: Version) -> None: ...

    def get_version(self, part: str, number: int) -> Version: ...

    def forget(self, part: str, updates: tuple[str, ...], before: int) -> None:
        """Merged updates and versions below `before` are no longer needed."""
        ...
