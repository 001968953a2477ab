"""One fragment of what a worker trains, with rounds of its own; a part that travels whole is a single one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future

from stages.errors import ConfigError
from trainer.rounds.codec import codec_named
from trainer.rounds.feedback import ErrorFeedback
from trainer.rounds.holdings import Holding
from trainer.rounds.overlap import new_overlap
from trainer.rounds.settings import RoundSettings
from trainer.rounds.tensors import Shapes, Tensors, digest, norm, subtract
from trainer.rounds.worker_state import Pending, PieceStanding
from trainer.v1 import rounds_pb2

BASE, HELD, OWN, CARRIED, OVERLAP = "base", "held", "own", "carried", "overlap"
"""Groups of a worker's state: where a round began, the version that it holds, its last pseudo-gradient, what its codec
rounded away, and what the overlap remembers."""


class Piece:
    """What a worker knows of one fragment."""

    def __init__(self, index: int, name: str, like: Shapes, settings: RoundSettings) -> None:
        """:param name: what the ledger calls it; :param like: shapes of its tensors."""
        self.index, self.name, self.like, self.settings = index, name, like, settings
        self.feedback, self.overlap = ErrorFeedback(codec_named(settings.codec)), new_overlap(settings)
        self.standing = PieceStanding()
        self.base, self.own = Tensors(), Tensors()
        self.sending: Future[rounds_pb2.Verdict] | None = None
        self.oriented = False
        """Whether this process knows of its round that it is worth going on with."""

    # Rounds

    def goes_on(self, open_round: int) -> bool:
        """Whether the round that it is in is still worth its end."""
        if self.standing.round is None:
            return False
        behind = open_round - self.standing.round
        return behind <= 0 or (self.settings.late != "drop" and behind <= self.settings.max_staleness)

    def begin(self, round_: int, version: int, weights: Tensors) -> Tensors:
        """The weights with which this round begins, of those of the newest version."""
        standing = self.standing
        merged = standing.own_in is not None and version >= standing.own_in
        # the overlap counts each of our rounds once, whether or not this one comes to its end
        self.base, self.own = self.overlap.start(weights, self.own or None, merged), {}
        standing.round, standing.base_version, standing.steps = round_, version, 0
        return self.base

    def give_up(self) -> None:
        """The round is not worth its end any more."""
        assert self.standing.round is not None
        self.standing.finished, self.standing.round = self.standing.round, None

    def finish(self, weights: Tensors, sequences: int, losses: dict[str, float], author: str) -> None:
        """Make the round's update, to be handed in. Raises ConfigError for weights that are not finite.

        :param weights: of the whole part; :param sequences: in a batch; :param losses: of the last step; :param author:
        run and worker.
        """
        standing = self.standing
        assert standing.round is not None
        delta = subtract(self.base, {key: weights[key] for key in self.like})
        if not norm(delta) < float("inf"):
            raise ConfigError(f"{self.name}: weights are not finite after round {standing.round}; lower the rates")
        payload = self.feedback.encode(delta)
        steps = min(standing.steps, self.settings.steps_per_round)
        standing.pending = Pending(
            id=_submission_id(f"{author} {self.name}", standing.round, payload),
            round=standing.round,
            base_version=standing.base_version,
            steps=steps,
            sequences=steps * sequences,
            losses=losses,
            payload=payload,
        )
        if not self.overlap.waits:  # what the others get of it
            self.own = self.feedback.codec.decode(payload, self.like)
        standing.own_in = None
        standing.finished, standing.round = standing.round, None

    # State

    def state(self, held: Holding | None) -> dict[str, Tensors]:
        """Tensors by group; :param held: the version that is held of it."""
        groups = {OWN: self.own, CARRIED: self.feedback.carried, OVERLAP: self.overlap.state()}
        if held is not None:
            groups[HELD] = held.tensors
            self.standing.held_version = held.version
        if self.standing.round is not None and (held is None or self.base is not held.tensors):
            groups[BASE] = self.base
        return groups

    def restore(self, standing: PieceStanding, groups: Mapping[str, Tensors]) -> Holding | None:
        """Take what `state` returned, from the groups of the whole part; returns the version that is held."""
        mine = {name: {key: group[key] for key in self.like if key in group} for name, group in groups.items()}
        self.standing = standing
        held = mine.get(HELD) or None
        self.base, self.own = mine.get(BASE) or held or {}, mine.get(OWN, {})
        self.feedback.carried = mine.get(CARRIED, {})
        self.overlap.restore(mine.get(OVERLAP, {}))
        return Holding(standing.held_version, digest(held), held) if held else None


def _submission_id(author: str, round_: int, payload: bytes) -> str:
    """The same in every try; another for other work."""
    word = hashlib.sha256(f"{author} {round_} {hashlib.sha256(payload).hexdigest()}".encode())
    return f"r{round_}-{word.hexdigest()[:32]}"
