"""Who decides: which updates count, when a round is closed, what the next version is. No network, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.rounds.settings import RoundSettings
from trainer.rounds.store import Store
from trainer.rounds.tensors import Tensors
from trainer.rounds.update import Merged, Update, Verdict


class Ledger:
    """The state of all parts. The same calls in the same order give the same weights, bit for bit.

    Times are seconds on any clock that only goes forward; after a restart it may begin anew.
    """

    def __init__(
        self, settings: RoundSettings, parts: Mapping[str, Tensors], store: Store, identity: str, now_s: float = 0.0
    ) -> None:
        """:param parts: initial weights by part; those of the store win, and must have begun as these (by digest).

        :param identity: names the run; a store of another is refused with ResumeError.
        """
        raise NotImplementedError

    def parts(self) -> tuple[str, ...]:
        raise NotImplementedError

    def round(self, part: str) -> int:
        """The open round of a part; also its newest version."""
        raise NotImplementedError

    def weights(self, part: str) -> Tensors:
        """The newest version as workers have it. Not to be changed."""
        raise NotImplementedError

    def difference(self, part: str, version: int) -> bytes | None:
        """From version - 1 to `version` in the `down_codec`, while it is kept; empty or None: send the weights."""
        raise NotImplementedError

    def outer_state(self, part: str) -> Tensors:
        """What eager workers need: "momentum.NAME" where there is one, "mean.NAME": the last merged pseudo-gradient."""
        raise NotImplementedError

    def expect(self, part: str, workers: int) -> None:
        """So many workers will hand in for the open round (at first: settings.replicas). Not stored."""
        raise NotImplementedError

    def accept(self, update: Update, now_s: float) -> Verdict:
        """Judge an update; when it is accepted it is durable. Raises CheckpointError when it cannot be stored."""
        raise NotImplementedError

    def due_at(self, part: str) -> float | None:
        """When the open round will be due if nothing else comes; None: not before something comes."""
        raise NotImplementedError

    def due(self, part: str, now_s: float) -> bool:
        raise NotImplementedError

    def close(self, part: str, now_s: float) -> Merged:
        """Merge what has come and open the next round. Raises CheckpointError when it cannot be stored."""
        raise NotImplementedError
