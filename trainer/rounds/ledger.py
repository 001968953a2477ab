"""The ledger: decides which updates count, when a round closes, and the next version. It uses no network or clock."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Literal

from stages.errors import ResumeError
from trainer.blocks.config import RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.codecs import Tensors, norm, publish
from trainer.rounds.merging import Loss, Reputation, UpdateScore, admit, norm_problem, outer_step, round_problem, votes
from trainer.rounds.store import DATABASE, RESTORE, Record, Share, Store, Update, Version


def closes_at(settings: RoundSettings, arrivals: Sequence[float], expected: int, past: Sequence[float]) -> float | None:
    """Seconds after its start at which a round ends if no more updates arrive; None if it waits for more.

    arrivals: times in this round, only of updates in time, ascending; expected: workers; past: likewise of earlier
    rounds. A round ends at once when all expected updates are there, whatever this says, and never without any.
    """
    if not settings.deadline_s:
        # The coordinator expects nothing from a worker whose lease expired, so this never waits for ever.
        return None
    needed = max(1, math.ceil(settings.quorum * expected))
    if len(arrivals) < needed:
        return settings.deadline_s
    # A quorum, then a grace period: the others get `grace` times the median of the arrivals seen so far.
    return min(settings.deadline_s, max(arrivals[needed - 1], settings.grace * median((*past, *arrivals))))


HISTORY_SIZE = 64  # past arrivals and norms that new ones are compared with
KEPT_VERSIONS = 4  # versions kept for workers that fetch missed differences


@dataclass(frozen=True)
class UpdateVerdict:
    """`accepted`: will be merged; `duplicate`: already known; `dropped`: late and worthless by rule; `refused`: wrong,
    with a sentence for the worker's owner."""

    kind: Literal["accepted", "duplicate", "dropped", "refused"]
    reason: str = ""


_refused = partial(UpdateVerdict, "refused")


@dataclass(frozen=True)
class Merged:
    """A closed round."""

    version: int
    updates: tuple[str, ...]  # ids of the merged updates, sorted
    # Of a `scored` merge: ids of the updates left out, and the score of each voter.
    left_out: tuple[str, ...] = ()
    scores: Mapping[str, UpdateScore] = field(default_factory=dict)


class Ledger:
    """The state of all parts. The same calls in the same order give the same weights, bit for bit.

    Times are seconds on any monotonic clock, which may start over after a restart.
    """

    def __init__(
        self, settings: RoundSettings, parts: Mapping[str, Tensors], store: Store, identity: str, now_s: float = 0.0
    ) -> None:
        """:param parts: initial weights by part. The store's weights take precedence, and must have started from these.

        :param identity: names the run; raises ResumeError for another run's store.
        """
        self.settings, self.store = settings, store
        # Names this run apart from others with the same settings; it lasts as long as the directory.
        self.incarnation = secrets.token_hex(8)
        # Selects the held-out text of each merge; never leaves this directory.
        self.secret = secrets.randbits(48)
        self._parts = {name: _Part(name, weights, settings, now_s) for name, weights in parts.items()}
        records = store.records()
        if not records:
            self._begin(identity)
        else:
            try:
                self._resume(identity, records)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ResumeError(f"{DATABASE} has an event that makes no sense ({error!r}); {RESTORE}") from None

    def round(self, part: str) -> int:
        """The open round of a part; also its newest version."""
        return self._parts[part].round

    def weights(self, part: str, at_start_of: str | None = None) -> Tensors:
        """The newest version as workers have it, or as part `at_start_of` began its round. Do not change it."""
        p = self._parts[part]
        return self._version(p, p.round if at_start_of is None else self._parts[at_start_of].start_version(p)).public

    def digest(self, part: str) -> str:
        """SHA-256 of the newest version as workers have it."""
        return self._parts[part].public_digest

    def difference(self, part: str, version: int) -> bytes | None:
        """The difference from version - 1 to `version` in the `down_codec`; None if the weights must be sent whole."""
        p = self._parts[part]
        return (self._version(p, version).difference or None) if version in p.digests else None

    def version_with(self, part: str, name: str, worker: str) -> int | None:
        """The version that merges a worker's update, by the update's id: 0 if it was dropped; None if it is unknown or
        too old to count.
        """
        owner, version = self._parts[part].ids.get(name, ("", 0))
        return version if owner == worker else None

    def begin(self, part: str, now_s: float) -> None:
        """Record that a worker begins the open round. The round's scores use the versions that the first worker has of
        other parts; these are stored with the updates.
        """
        p = self._parts[part]
        p.start_versions = p.start_versions or {name: other.round for name, other in self._parts.items()}
        # Otherwise an adaptive deadline would count the minutes of the workers' start as time that a round needs.
        if not (p.has_workers or p.arrivals):
            p.begun_s = now_s
        p.has_workers = True

    def expect(self, part: str, workers: int) -> None:
        """Set the number of workers that hand in for the open round (at first settings.replicas). Not stored."""
        self._parts[part].expected = workers

    def accept(self, update: Update, now_s: float) -> UpdateVerdict:
        """Judge an update; an accepted one is durable. Raises CheckpointError if it cannot be stored."""
        part = self._parts[update.part]
        if update.id in part.ids:
            if self.version_with(part.name, update.id, update.worker) is not None:
                return UpdateVerdict("duplicate")
            return _refused(f"another worker has already submitted {update.id} for {part.name}; ids must be unique")
        if reason := round_problem(update, part.round, self.settings):
            return _refused(reason)
        length = norm(update.delta)
        if reason := norm_problem(length, part.length, part.norms, self.settings):
            return _refused(reason)
        if (other := part.submitted.get((update.worker, update.round))) is not None:
            return _refused(f"{update.worker} has already submitted {other} for round {update.round} of {part.name}")
        # names cost nothing: a worker that keeps taking new ones must not fill the disk or a merge
        if sum(number == update.round for _, number in part.submitted) >= self.settings.replicas:
            full = f"round {update.round} of {part.name} already has updates from its {self.settings.replicas} workers"
            return _refused(f"{full}: another worker has submitted for your place")
        staleness = part.round - update.round
        discount = self.settings.stale_discount**staleness
        record = {
            **{name: value for name, value in vars(update).items() if name != "delta"},
            "kind": "accepted" if discount else "dropped",
            "voter": update.voter or update.worker,
            "staleness": staleness,
            "weight": update.steps * discount,
            "norm": length,
            "after_s": round(now_s - part.begun_s, 3),
            "beside": part.start_versions,
        }
        if discount:
            record["sha256"] = self.store.put_update(update)
        self.store.commit(record)
        part.take(record)
        if discount:
            return UpdateVerdict("accepted")
        return UpdateVerdict("dropped", f"round {update.round} of {part.name} is closed; late updates are dropped")

    def due_at(self, part: str) -> float | None:
        """Time at which the open round is due if nothing more arrives; None: not until something arrives."""
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
        """Voters whose work for one of these parts was harmful repeatedly. The caller has to keep them away."""
        return set[str]().union(*(self._parts[name].reputation.expelled for name in parts))

    def close(self, part: str, now_s: float, loss: Callable[[str, int], Loss] | None = None) -> Merged:
        """Merge the updates received and open the next round. Raises CheckpointError if the result cannot be stored.

        :param loss: makes the held-out loss for a part and round; needed if merges are `scored`.
        """
        p = self._parts[part]
        ready = p.ready()
        assert ready, f"no update for round {p.round} of {part}"
        deltas = [self.store.get_update(part, record["id"], record["sha256"]) for record in ready]
        sent = [(record["voter"], Share(record["weight"], delta)) for record, delta in zip(ready, deltas, strict=True)]
        shares = votes(sent, self.settings.steps_per_round)
        # a sparse codec's last updates carry the remainder of many rounds: with momentum they would overshoot
        is_rest = self.settings.up_codec(p.round) != self.settings.codec
        settings = replace(self.settings, outer_rate=1.0, outer_momentum=0.0) if is_rest else self.settings
        scores = dict[str, UpdateScore]()

        def step(found: Sequence[Share]) -> Tensors:
            return outer_step(settings, p.version.weights, found, p.version.outer)[0]

        if self.settings.robust == "scored":
            assert loss is not None, "a scored merge needs held-out text"
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
        run = {"kind": "run", "identity": identity, "incarnation": self.incarnation, "secret": f"{self.secret:x}"}
        self.store.commit({**run, "parts": begun, "stored": stored})

    def _resume(self, identity: str, records: Sequence[Record]) -> None:
        first, *others = records
        if first["kind"] != "run" or first["identity"] != identity:
            raise ResumeError(
                "these rounds belong to a run with other settings or data; give the same to resume, or another --out"
            )
        self.incarnation, self.secret = str(first["incarnation"]), int(first["secret"], 16)
        begun = {name: part.digests[0] for name, part in self._parts.items()}
        if first["parts"] != begun:
            raise ResumeError("these rounds began with other weights; did another version of onesweep start them?")
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
    """The ledger's state of one part. Only `take` and `follow` change state that records determine."""

    def __init__(self, name: str, weights: Tensors, settings: RoundSettings, now_s: float) -> None:
        self.name, self.settings = name, settings
        self.length = norm(weights)
        self.version = Version(weights, weights)
        self.public_digest = digest(weights)
        self.digests = {0: self.public_digest}  # of the stored versions
        self.round, self.start_versions = 0, dict[str, int]()  # the open round; each part's version at its start
        self.begun_s, self.expected, self.has_workers = now_s, settings.replicas, False
        self.pending: dict[str, Record] = {}
        self.ids: dict[str, tuple[str, int]] = {}  # by update: its worker, and the version that merges it
        self.submitted: dict[tuple[str, int], str] = {}
        self.arrivals: list[float] = []
        self.past: deque[float] = deque(maxlen=HISTORY_SIZE)
        self.norms: deque[float] = deque(maxlen=HISTORY_SIZE)
        self.reputation = Reputation()

    def ready(self) -> list[Record]:
        """Updates that the open round merges, in an order independent of arrival."""
        return sorted(self.pending.values(), key=lambda record: record["id"])

    def take(self, record: Record) -> None:
        version = record["round"] + record["staleness"] + 1 if record["kind"] == "accepted" else 0
        self.ids[record["id"]] = record["worker"], version
        self.submitted[record["worker"], record["round"]] = record["id"]
        if record["kind"] == "dropped":
            return
        if not all(math.isfinite(record[name]) for name in ("weight", "norm", "after_s")):
            raise ValueError(record["id"])
        self.pending[record["id"]] = record | {"voter": str(record["voter"])}
        self.norms.append(record["norm"])
        if record["round"] == self.round:
            self.arrivals.append(record["after_s"])
            self.start_versions = {name: int(version) for name, version in record.get("beside", {}).items()}

    def start_version(self, other: _Part) -> int:
        """The version of another part that workers had when the open round began, or the oldest one kept."""
        return max(self.start_versions.get(other.name, other.round), min(other.digests))

    def follow(self, record: Record) -> None:
        """Move on to the round after the closed one."""
        for name in (*record.get("left_out", ()), *record["updates"]):
            del self.pending[name]
        self.reputation.take(record.get("scores", {}))
        self.round = record["round"] + 1
        self.past.extend(self.arrivals)
        self.arrivals, self.start_versions = [], {}
        self.public_digest, self.digests[self.round] = str(record["weights"]), record["sha256"]
        self.digests.pop(self.round - KEPT_VERSIONS, None)
        # older updates are refused as stale
        oldest = self.round - self.settings.max_staleness - 1
        self.submitted = {key: name for key, name in self.submitted.items() if key[1] >= oldest}
        self.ids = {name: self.ids[name] for name in self.submitted.values()}
