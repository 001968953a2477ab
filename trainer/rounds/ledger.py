"""The ledger decides which updates count, when a round is closed and what the next version is. No network, no clock."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Literal

from stages.errors import ResumeError
from trainer.blocks.config import RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.codecs import Tensors, norm, publish
from trainer.rounds.merging import Loss, Reputation, UpdateScore, admit, outer_step, votes, wrong_norm, wrong_round
from trainer.rounds.store import Record, Share, Store, Update, Version


def closes_at(settings: RoundSettings, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
    """Seconds after its begin at which a round ends if nothing else comes; None where it waits for more.

    arrivals: of this round, in time, ascending; expected: workers; past: arrivals of earlier rounds, in time. A round
    in which all that are expected have come ends at once, whatever this says; one to which nothing came does not end.
    """
    if not settings.deadline_s:
        # The coordinator expects nothing of a worker whose lease ran out, so this waits for nobody for ever.
        return None
    needed = max(1, math.ceil(settings.quorum * expected))
    if len(arrivals) < needed:
        return settings.deadline_s
    # A quorum, then a grace: the others have until so many times the median of the arrivals seen so far.
    return min(settings.deadline_s, max(arrivals[needed - 1], settings.grace * median((*past, *arrivals))))


REMEMBERED = 64  # arrivals and norms of the past by which new ones are judged
KEPT_VERSIONS = 4  # for workers that fetch the differences they missed


@dataclass(frozen=True)
class UpdateVerdict:
    """`accepted`: will be merged; `duplicate`: is known already; `dropped`: late, and worth nothing by rule;
    `refused`: wrong, with a sentence for the worker's owner."""

    kind: Literal["accepted", "duplicate", "dropped", "refused"]
    reason: str = ""


@dataclass(frozen=True)
class Merged:
    """A closed round."""

    version: int
    updates: tuple[str, ...]  # ids of what was merged, sorted
    # Of a merge that is `scored`: ids of the updates that it left out, and the score of each voter.
    left_out: tuple[str, ...] = ()
    scores: Mapping[str, UpdateScore] = field(default_factory=dict)


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
        self.settings, self.store = settings, store
        # Names this run, not another of the same settings; it lasts as long as the directory.
        self.incarnation = secrets.token_hex(8)
        # Chooses the held-out text of each merge; never leaves this directory.
        self.secret = secrets.token_hex(6)
        self._parts = {name: _Part(name, weights, settings, now_s) for name, weights in parts.items()}
        records = store.records()
        if not records:
            self._begin(identity)
        else:
            self._resume(identity, records)

    def round(self, part: str) -> int:
        """The open round of a part; also its newest version."""
        return self._parts[part].round

    def weights(self, part: str, beside: str | None = None) -> Tensors:
        """The newest version as workers have it, or that beside which another's round began. Not to be changed."""
        p = self._parts[part]
        return self._version(p, p.round if beside is None else self._parts[beside].began_beside(p)).public

    def digest(self, part: str) -> str:
        """SHA-256 of the newest version as workers have it."""
        return self._parts[part].public_digest

    def difference(self, part: str, version: int) -> bytes | None:
        """From version - 1 to `version` in the `down_codec`; None where the weights must be sent whole."""
        p = self._parts[part]
        return (self._version(p, version).difference or None) if version in p.digests else None

    def version_with(self, part: str, name: str, worker: str) -> int | None:
        """The version that a worker's update goes into, by its id, 0 where it was dropped; None where it is not known,
        or too old to count.
        """
        owner, version = self._parts[part].ids.get(name, ("", 0))
        return version if owner == worker else None

    def begin(self, part: str, now_s: float) -> None:
        """A worker begins the open round. The versions that the first one has of other parts are those of the
        round's scores; they are stored with the updates.
        """
        p = self._parts[part]
        p.beside = p.beside or {name: other.round for name, other in self._parts.items()}
        # An adaptive deadline would take the minutes in which workers are started for the time that a round needs.
        if not (p.has_workers or p.arrivals):
            p.begun_s = now_s
        p.has_workers = True

    def expect(self, part: str, workers: int) -> None:
        """So many workers hand in for the open round (at first: settings.replicas). Not stored."""
        self._parts[part].expected = workers

    def accept(self, update: Update, now_s: float) -> UpdateVerdict:
        """Judge an update; when it is accepted it is durable. Raises CheckpointError when it cannot be stored."""
        part = self._parts[update.part]
        if update.id in part.ids:
            if self.version_with(part.name, update.id, update.worker) is not None:
                return UpdateVerdict("duplicate")
            return UpdateVerdict(
                "refused", f"another worker has handed in {update.id} for {part.name}; ids are used once"
            )
        if reason := wrong_round(update, part.round, self.settings):
            return UpdateVerdict("refused", reason)
        length = norm(update.delta)
        if reason := wrong_norm(length, part.length, part.norms, self.settings):
            return UpdateVerdict("refused", reason)
        if (other := part.handed_in.get((update.worker, update.round))) is not None:
            return UpdateVerdict(
                "refused", f"{update.worker} has handed in {other} for round {update.round} of {part.name} already"
            )
        # names cost nothing: who takes new ones must not fill the disk, nor a merge
        if sum(number == update.round for _, number in part.handed_in) >= self.settings.replicas:
            many = f"round {update.round} of {part.name} has the updates of its {self.settings.replicas} workers"
            return UpdateVerdict("refused", f"{many}: somebody else has handed in for your place")
        staleness = part.round - update.round
        worth = self.settings.stale_discount**staleness
        record = {
            **{name: value for name, value in vars(update).items() if name != "delta"},
            "kind": "accepted" if worth else "dropped",
            "voter": update.voter or update.worker,
            "staleness": staleness,
            "weight": update.steps * worth,
            "norm": length,
            "after_s": round(now_s - part.begun_s, 3),
            "beside": part.beside,
        }
        if not worth:
            self.store.commit(record)
            part.take(record)
            return UpdateVerdict("dropped", f"round {update.round} of {part.name} was closed, and late work is dropped")
        record["sha256"] = self.store.put_update(update)
        self.store.commit(record)
        part.take(record)
        return UpdateVerdict("accepted")

    def due_at(self, part: str) -> float | None:
        """Time at which the open round is due if nothing else comes; None: not before something comes."""
        p = self._parts[part]
        if not p.ready():
            return None
        arrivals = sorted(p.arrivals)
        if len(arrivals) >= p.expected:
            return p.begun_s + max(arrivals, default=0.0)
        after = closes_at(self.settings, arrivals, p.expected, tuple(p.past))
        return None if after is None else p.begun_s + after

    def due(self, part: str, now_s: float) -> bool:
        at = self.due_at(part)
        return at is not None and now_s >= at

    def expelled(self, parts: Sequence[str]) -> set[str]:
        """Voters whose work for one of these was harmful time after time. Whom to keep away is for others to do."""
        return set[str]().union(*(self._parts[name].reputation.expelled for name in parts))

    def close(self, part: str, now_s: float, loss: Callable[[str, int], Loss] | None = None) -> Merged:
        """Merge what has come and open the next round. Raises CheckpointError when it cannot be stored.

        :param loss: on held-out text, of a part and round; needed where merges are `scored`.
        """
        p = self._parts[part]
        ready = p.ready()
        assert ready, f"nothing came for round {p.round} of {part}"
        deltas = [self.store.get_update(part, record["id"], record["sha256"]) for record in ready]
        sent = [(record["voter"], Share(record["weight"], delta)) for record, delta in zip(ready, deltas, strict=True)]
        shares = votes(sent, self.settings.steps_per_round)
        # the last updates of a sparse codec bring the rest of many rounds: with momentum they would go too far
        is_rest = self.settings.up_codec(p.round) != self.settings.codec
        settings = replace(self.settings, outer_rate=1.0, outer_momentum=0.0) if is_rest else self.settings
        scores = dict[str, UpdateScore]()

        def step(found: Sequence[Share]) -> Tensors:
            return outer_step(settings, p.version.weights, found, p.version.outer)[0]

        if self.settings.robust == "scored":
            assert loss is not None, "a merge that is scored needs held-out text"
            shares = {v: replace(s, weight=s.weight * p.reputation.weight(v)) for v, s in shares.items()}
            scores = admit(p.version.weights, shares, step, loss(part, p.round), p.reputation.weight)
            shares = {voter: share for voter, share in shares.items() if scores[voter].kept}
        weights, momentum = p.version.weights, p.version.outer
        if shares:
            weights, momentum = outer_step(settings, weights, list(shares.values()), momentum)
        number, ids = p.round + 1, tuple(record["id"] for record in ready if record["voter"] in shares)
        left_out = tuple(record["id"] for record in ready if record["voter"] not in shares)
        public, difference = publish(weights, p.version.public, self.settings.version_codec(number))
        version = Version(weights, public, momentum, difference)
        scored = {"left_out": list(left_out), "scores": {v: asdict(score) for v, score in scores.items()}}
        record = {
            "kind": "closed",
            "part": part,
            "round": p.round,
            "updates": list(ids),
            **(scored if scores else {}),
            "after_s": round(now_s - p.begun_s, 3),
            "sha256": self.store.put_version(part, number, version),
            "weights": digest(public),
        }
        self.store.commit(record)
        p.follow(record)
        p.version, p.begun_s = version, now_s
        self.store.forget(part, (*ids, *left_out), number + 1 - KEPT_VERSIONS)
        return Merged(number, ids, left_out, scores)

    def _version(self, p: _Part, number: int) -> Version:
        return p.version if number == p.round else self.store.get_version(p.name, number, p.digests[number])

    def _begin(self, identity: str) -> None:
        begun = {name: part.digests[0] for name, part in self._parts.items()}
        for name, part in self._parts.items():
            part.digests[0] = self.store.put_version(name, 0, part.version)
        stored = {name: part.digests[0] for name, part in self._parts.items()}
        run = {"kind": "run", "identity": identity, "incarnation": self.incarnation, "secret": self.secret}
        self.store.commit({**run, "parts": begun, "stored": stored})

    def _resume(self, identity: str, records: Sequence[Record]) -> None:
        first, *others = records
        if first["kind"] != "run" or first["identity"] != identity:
            raise ResumeError(
                "these rounds belong to a run with other settings or data; give the same to go on, or another --out"
            )
        self.incarnation, self.secret = first["incarnation"], first["secret"]
        begun = {name: part.digests[0] for name, part in self._parts.items()}
        if first["parts"] != begun:
            raise ResumeError("these rounds began with other weights; the same settings on another version?")
        for name, sha256 in first["stored"].items():
            self._parts[name].digests[0] = sha256
        for record in others:
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
    """The ledger's state of one part. Only `take` and `follow` change what records decide."""

    def __init__(self, name: str, weights: Tensors, settings: RoundSettings, now_s: float) -> None:
        self.name, self.settings = name, settings
        self.length = norm(weights)
        self.version = Version(weights, weights)
        self.public_digest = digest(weights)
        self.digests = {0: self.public_digest}  # of what is stored, by version
        self.round, self.beside = 0, dict[str, int]()  # versions of all parts when its round began
        self.begun_s, self.expected, self.has_workers = now_s, settings.replicas, False
        self.pending: dict[str, Record] = {}
        self.ids: dict[str, tuple[str, int]] = {}  # of each update its worker, and the version that it goes into
        self.handed_in: dict[tuple[str, int], str] = {}
        self.arrivals: list[float] = []
        self.past: deque[float] = deque(maxlen=REMEMBERED)
        self.norms: deque[float] = deque(maxlen=REMEMBERED)
        self.reputation = Reputation()

    def ready(self) -> list[Record]:
        """Updates that the open round merges, in an order that does not depend on arrival."""
        return sorted(self.pending.values(), key=lambda record: record["id"])

    def take(self, record: Record) -> None:
        version = record["round"] + record["staleness"] + 1 if record["kind"] == "accepted" else 0
        self.ids[record["id"]] = record["worker"], version
        self.handed_in[record["worker"], record["round"]] = record["id"]
        if record["kind"] == "dropped":
            return
        self.pending[record["id"]] = record
        self.norms.append(record["norm"])
        if record["round"] == self.round:
            self.arrivals.append(record["after_s"])
            self.beside = record.get("beside", {})

    def began_beside(self, other: _Part) -> int:
        """The version of another part that workers had when the open round began; the oldest that is kept."""
        return max(self.beside.get(other.name, other.round), min(other.digests))

    def follow(self, record: Record) -> None:
        """Go on to the round after the one that was closed."""
        for name in (*record.get("left_out", ()), *record["updates"]):
            del self.pending[name]
        self.reputation.take(record.get("scores", {}))
        self.round = record["round"] + 1
        self.past.extend(self.arrivals)
        self.arrivals, self.beside = [], {}
        self.public_digest, self.digests[self.round] = record["weights"], record["sha256"]
        self.digests.pop(self.round - KEPT_VERSIONS, None)
        # older ones are refused as stale
        oldest = self.round - self.settings.max_staleness - 1
        self.handed_in = {key: name for key, name in self.handed_in.items() if key[1] >= oldest}
        self.ids = {name: self.ids[name] for name in self.handed_in.values()}
