"""Who decides: which updates count, when a round is closed, what the next version is. No network, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from stages.errors import ResumeError
from trainer.rounds.curve import Curves
from trainer.rounds.deadline import new_deadline
from trainer.rounds.late import new_late
from trainer.rounds.merge import of_all
from trainer.rounds.outer import new_outer
from trainer.rounds.publication import publish
from trainer.rounds.robust import new_robust
from trainer.rounds.screening import screen
from trainer.rounds.settings import RoundSettings
from trainer.rounds.store import Record, Store, Version
from trainer.rounds.tensors import Tensors, digest, norm, shapes
from trainer.rounds.update import Merged, Share, Update, Verdict

REMEMBERED = 64
"""Arrivals and norms of the past by which new ones are judged."""
KEPT_VERSIONS = 4
"""For workers that fetch the differences they missed."""


class Ledger:
    """The state of all parts. The same calls in the same order give the same weights, bit for bit.

    Times are seconds on any clock that only goes forward; after a restart it may begin anew.
    """

    def __init__(
        self, settings: RoundSettings, parts: Mapping[str, Tensors], store: Store, identity: str, now_s: float = 0.0
    ) -> None:
        """:param parts: initial weights by part. What the store has wins, and must have begun as these.

        :param identity: names the run; a store of another is refused with ResumeError.
        """
        self.settings, self.store, self.curves = settings, store, Curves()
        self.deadline, self.late, self.robust = new_deadline(settings), new_late(settings), new_robust(settings)
        self._parts = {name: _Part(name, weights, settings, now_s) for name, weights in parts.items()}
        records = store.records()
        if not records:
            self._begin(identity)
        else:
            self._resume(identity, records)

    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def round(self, part: str) -> int:
        """The open round of a part; also its newest version."""
        return self._parts[part].round

    def weights(self, part: str) -> Tensors:
        """The newest version as workers have it. Not to be changed."""
        return self._parts[part].version.public

    def difference(self, part: str, version: int) -> bytes | None:
        """From version - 1 to `version` in the `down_codec`; None where the weights must be sent whole."""
        p = self._parts[part]
        if version == p.round:
            return p.version.difference or None
        sha256 = p.digests.get(version)
        if sha256 is None:
            return None
        return self.store.get_version(part, version, sha256).difference or None

    def owner(self, part: str, name: str) -> str | None:
        """The worker whose update has this id; None for one that is not known, or too old to count."""
        return self._parts[part].ids.get(name)

    def begin(self, part: str, now_s: float) -> None:
        """The open round begins now, if nothing has come for it. Not stored."""
        p = self._parts[part]
        if not p.arrivals:
            p.begun_s = now_s

    def expect(self, part: str, workers: int) -> None:
        """So many workers hand in for the open round (at first: settings.replicas). Not stored."""
        self._parts[part].expected = workers

    def accept(self, update: Update, now_s: float) -> Verdict:
        """Judge an update; when it is accepted it is durable. Raises CheckpointError when it cannot be stored."""
        part = self._parts.get(update.part)
        if part is None:
            return Verdict("refused", f"there is no part {update.part[:64]!r}; there are {', '.join(self._parts)}")
        if (owner := part.ids.get(update.id)) is not None:
            if owner == update.worker:
                return Verdict("duplicate")
            return Verdict("refused", f"another worker has handed in {update.id} for {part.name}; ids are used once")
        length = norm(update.delta)
        if reason := screen(update, part.like, part.length, length, part.round, part.norms, self.settings):
            return Verdict("refused", reason)
        if (other := part.handed_in.get((update.worker, update.round))) is not None:
            return Verdict(
                "refused", f"{update.worker} has handed in {other} for round {update.round} of {part.name} already"
            )
        # names cost nothing: who takes new ones must not fill the disk, nor a merge
        if sum(number == update.round for _, number in part.handed_in) >= self.settings.replicas:
            many = f"round {update.round} of {part.name} has the updates of its {self.settings.replicas} workers"
            return Verdict("refused", f"{many}: somebody else has handed in for your place")
        staleness = max(part.round - update.round, 0)
        worth = self.late.worth(staleness) if staleness else 1.0
        record = {
            "kind": "accepted" if worth else "dropped",
            "part": part.name,
            "id": update.id,
            "worker": update.worker,
            "round": update.round,
            "base": update.base_version,
            "steps": update.steps,
            "sequences": update.sequences,
            "staleness": staleness,
            "weight": update.steps * worth,
            "norm": length,
            "losses": dict(update.losses),
            "after_s": round(now_s - part.begun_s, 3),
        }
        if not worth:
            self._commit(record)
            part.take(record)
            return Verdict("dropped", f"round {update.round} of {part.name} was closed, and late work is dropped")
        record["sha256"] = self.store.put_update(update)
        self._commit(record)
        part.take(record)
        return Verdict("accepted")

    def due_at(self, part: str) -> float | None:
        """When the open round is due if nothing else comes; None: not before something comes."""
        p = self._parts[part]
        if not p.ready():
            return None
        arrivals = sorted(p.arrivals)
        if len(arrivals) >= p.expected:
            return p.begun_s + max(arrivals, default=0.0)
        after = self.deadline.closes_at(arrivals, p.expected, tuple(p.past))
        return None if after is None else p.begun_s + after

    def due(self, part: str, now_s: float) -> bool:
        at = self.due_at(part)
        return at is not None and now_s >= at

    def close(self, part: str, now_s: float) -> Merged:
        """Merge what has come and open the next round. Raises CheckpointError when it cannot be stored."""
        p = self._parts[part]
        ready = p.ready()
        assert ready, f"nothing came for round {p.round} of {part}"
        shares = self.robust.temper([self._share(record) for record in ready])
        if self.late.shares_of_all:
            shares = of_all(shares, p.expected)
        outer = new_outer(self.settings)
        outer.restore(p.version.outer)
        weights = outer.step(p.version.weights, shares)
        public, difference = publish(weights, p.version.public, self.settings.down_codec)
        version = Version(weights, public, outer.state(), difference)
        number, ids = p.round + 1, tuple(record["id"] for record in ready)
        record = {
            "kind": "closed",
            "part": part,
            "round": p.round,
            "updates": list(ids),
            "after_s": round(now_s - p.begun_s, 3),
            "sha256": self.store.put_version(part, number, version),
            "weights": digest(public),
        }
        self._commit(record)
        p.follow(record)
        p.version, p.begun_s = version, now_s
        self.store.forget(part, ids, number + 1 - KEPT_VERSIONS)
        return Merged(part, number - 1, number, ids, public, difference)

    def _commit(self, record: Record) -> None:
        self.store.commit(record)
        self.curves.take(record)

    def _share(self, record: Record) -> Share:
        delta = self.store.get_update(record["part"], record["id"], record["sha256"])
        return Share(record["weight"], delta, record["staleness"])

    def _begin(self, identity: str) -> None:
        begun = {name: part.digests[0] for name, part in self._parts.items()}
        for name, part in self._parts.items():
            part.digests[0] = self.store.put_version(name, 0, part.version)
        stored = {name: part.digests[0] for name, part in self._parts.items()}
        self.store.commit({"kind": "run", "identity": identity, "parts": begun, "stored": stored})

    def _resume(self, identity: str, records: Sequence[Record]) -> None:
        first, *others = records
        if first.get("kind") != "run" or first["identity"] != identity:
            raise ResumeError(
                "these rounds belong to a run with other settings or data; give the same to go on, or another --out"
            )
        begun = {name: part.digests[0] for name, part in self._parts.items()}
        if first["parts"] != begun:
            raise ResumeError("these rounds began with other weights; the same settings on another version?")
        for name, sha256 in first["stored"].items():
            self._parts[name].digests[0] = sha256
        for record in others:
            self.curves.take(record)
            part = self._parts[record["part"]]
            if record["kind"] == "closed":
                part.follow(record)
            else:
                part.take(record)
        for part in self._parts.values():
            part.version = self.store.get_version(part.name, part.round, part.digests[part.round])
        self.store.retain(
            {(part.name, name) for part in self._parts.values() for name in part.pending},
            {(part.name, number) for part in self._parts.values() for number in part.digests},
        )


class _Part:
    """What the ledger knows of one part. Only `take` and `follow` change what records decide."""

    def __init__(self, name: str, weights: Tensors, settings: RoundSettings, now_s: float) -> None:
        self.name, self.settings = name, settings
        self.like, self.length = shapes(weights), norm(weights)
        self.version = Version(weights, weights)
        self.digests = {0: digest(weights)}
        self.round = 0
        self.begun_s, self.expected = now_s, settings.replicas
        self.pending: dict[str, Record] = {}
        self.ids: dict[str, str] = {}
        self.handed_in: dict[tuple[str, int], str] = {}
        self.arrivals: list[float] = []
        self.past: deque[float] = deque(maxlen=REMEMBERED)
        self.norms: deque[float] = deque(maxlen=REMEMBERED)

    def ready(self) -> list[Record]:
        """What the open round merges, in an order that does not depend on arrival."""
        return sorted((r for r in self.pending.values() if r["round"] <= self.round), key=lambda r: r["id"])

    def take(self, record: Record) -> None:
        self.ids[record["id"]] = record["worker"]
        self.handed_in[record["worker"], record["round"]] = record["id"]
        if record["kind"] == "dropped":
            return
        self.pending[record["id"]] = record
        self.norms.append(record["norm"])
        if record["round"] == self.round:
            self.arrivals.append(record["after_s"])

    def follow(self, record: Record) -> None:
        """Go on to the round after the one that was closed."""
        for name in record["updates"]:
            del self.pending[name]
        self.round = record["round"] + 1
        self.past.extend(self.arrivals)
        # what came ahead of its round was there when it began
        self.arrivals = [0.0 for r in self.pending.values() if r["round"] == self.round]
        self.digests[self.round] = record["sha256"]
        self.digests.pop(self.round - KEPT_VERSIONS, None)
        # older ones are refused as stale
        oldest = self.round - self.settings.max_staleness - 1
        self.handed_in = {key: name for key, name in self.handed_in.items() if key[1] >= oldest}
        self.ids = {name: worker for (worker, _), name in self.handed_in.items()}
