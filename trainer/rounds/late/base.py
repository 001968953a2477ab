"""The interface of late policies: what an update is worth that comes after its round was closed."""

from __future__ import annotations

from typing import Protocol


class Late(Protocol):
    def worth(self, staleness: int) -> float:
        """Factor of its weight in the round that is open, from 0 to 1; at 0 it is dropped.

        staleness: rounds that were closed since its own was open, at least 1.
        """
        ...

    @property
    def shares_of_all(self) -> bool:
        """Whether an update moves the weights by its share of all workers, instead of its share of those that came."""
        ...
