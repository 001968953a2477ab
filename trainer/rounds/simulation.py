"""Rounds in one process, with real training and a real ledger, but virtual time and links."""

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from stages.errors import ConfigError
from stages.settings import Checked, limits
from trainer.blocks.config import TrainingConfig
from trainer.blocks.data import Corpus
from trainer.rounds.codecs import CODECS, Tensors, route, scale, whole_size
from trainer.rounds.ledger import Ledger
from trainer.rounds.merging import HeldOut
from trainer.rounds.parts import FeatureFormat, Learner, load_copies, reads_features, sends_features
from trainer.rounds.spec import RunSpec, replica_seed
from trainer.rounds.store import Store, Update
from trainer.rounds.worker_state import WorkerProgress, WorkerRounds

Fate = Literal["in time", "late", "lost"]
# Settings that make a virtual worker miss features of the worker before it.
ABSENT = ("in_time", "lost", "lie")


@dataclass(frozen=True)
class SimulatedWorkers(Checked):
    """Speeds and links of virtual workers, and the fates of their updates. Seconds are virtual."""

    step_s: float = field(default=1.0, metadata=limits(above=0))  # of a local step
    # Slowdown factor of each replica; repeats from the front if there are more replicas.
    slowness: tuple[float, ...] = field(default=(1.0,), metadata=limits(above=0))
    latency_s: float = field(default=0.1, metadata=limits(above=0))  # of a message
    up_mbps: float = field(default=20.0, metadata=limits(above=0))  # of a worker's link
    down_mbps: float = field(default=100.0, metadata=limits(above=0))
    in_time: float = field(default=1.0, metadata=limits(minimum=0, maximum=1))  # share of updates; the others are late
    late_rounds: float = field(default=1.5, metadata=limits(above=0))  # how many rounds late
    lost: float = field(default=0.0, metadata=limits(minimum=0, maximum=0.99))  # share of updates that never arrive
    lie: float = 1.0  # factor on the length of a liar's updates; below 0 they point backwards
    liars: int = field(default=1, metadata=limits(minimum=1))  # the last replicas lie

    def check_run(self, config: TrainingConfig) -> None:
        """Raise ConfigError if such workers cannot train a run with these settings."""
        honest, lockstep = SimulatedWorkers(), not config.rounds.deadline_s
        absent = any(getattr(self, name) != getattr(honest, name) for name in ABSENT)
        if config.rounds.by_features and (absent or (len(set(self.slowness)) > 1 and not lockstep)):
            raise ConfigError(
                "virtual workers that read features must be in every round: set deadline_s = 0 and "
                f'omit {", ".join(ABSENT)}; or set context_by = "copies"'
            )

    def training_s(self, replica: int, steps: int) -> float:
        return steps * self.step_s * self.slowness[replica % len(self.slowness)]

    def up_s(self, size: int) -> float:
        """Time of a message of `size` bytes to the coordinator."""
        return self.latency_s + size * 8e-6 / self.up_mbps

    def down_s(self, size: int) -> float:
        return self.latency_s + size * 8e-6 / self.down_mbps

    def fate(self, seed: int, part: str, update: str) -> Fate:
        """The fate of an update, by its id: a pure function of the run's seed."""
        draw = random.Random(f"{seed} {part} {update}")
        if draw.random() < self.lost:
            return "lost"
        return "in time" if draw.random() < self.in_time else "late"


@dataclass
class RoundsTraffic:
    """Bytes on the links and counts of updates."""

    up_bytes: int = 0
    down_bytes: int = 0  # of the parts that workers train
    copies_bytes: int = 0  # of their copies of other parts
    features_bytes: int = 0  # of the features that they read instead
    updates: Counter[str] = field(default_factory=Counter)  # by fate: in time, late, dropped, refused, lost
    busy_s: float = 0.0  # virtual seconds that all workers spent training
    seconds: float = 0.0  # virtual, until the last round closed


class Simulation:
    """Parts times replicas, driven by a queue of events in virtual time; everything in it is deterministic."""

    def __init__(self, spec: RunSpec, corpus: Corpus, fleet: SimulatedWorkers) -> None:
        self.spec, self.settings, self.fleet = spec, spec.config.rounds, fleet
        self.ledger = Ledger(self.settings, spec.initial(), Store(), "simulation")
        scored = self.settings.robust == "scored"
        self.loss = HeldOut(spec, corpus, self.ledger.weights, spec.config.seed) if scored else None
        # By reading part and replica: a round's features, and the time when the first of them arrive.
        self.passed: dict[tuple[int, int], tuple[float, list[Tensor]]] = {}
        self.traffic = RoundsTraffic()
        self.workers = [
            VirtualWorker(spec, index, replica, corpus, self)
            for index in range(len(spec.parts))
            for replica in range(self.settings.replicas)
        ]
        self.waiting: list[VirtualWorker] = []
        self.unfed: dict[tuple[int, int], VirtualWorker] = {}
        self.refused = defaultdict[tuple[str, int], set[str]](set)  # workers by part and round
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._events = 0

    def run(self) -> RoundsTraffic:
        """Train until every part has finished its last round. Raises the errors of training."""
        for worker in self.workers:
            self.at(0.0, worker.train)
        while self._queue or self.waiting:
            if not self._queue:  # all updates of a round were lost, and no worker would ever hand in
                waiting, self.waiting = self.waiting, []
                for worker in waiting:
                    worker.retry(self.traffic.seconds)
            now, _, action = heapq.heappop(self._queue)
            action(now)
        return self.traffic

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Schedule `action` for a time; actions at the same time run in the order of the calls."""
        heapq.heappush(self._queue, (time, self._events, action))
        self._events += 1

    def published(self) -> dict[str, Tensors]:
        """The newest weights of every part."""
        return {part: self.ledger.weights(part) for part in self.spec.parts}

    def may_begin(self, index: int, round_: int) -> bool:
        """True if a coordinator's feature relay would allow it."""
        later = self.spec.parts[index + 1 :] if self.settings.by_features else ()
        return all(self.ledger.round(part) >= round_ for part in later)

    def expect(self, part: str) -> None:
        """Make the open round wait for all workers except expelled ones and those refused in it."""
        gone = self.ledger.expelled([part]) | self.refused[part, self.ledger.round(part)]
        self.ledger.expect(part, max(self.settings.replicas - len(gone), 1))

    def arrive(self, update: Update, now: float) -> None:
        staleness = self.ledger.round(update.part) - update.round
        verdict = self.ledger.accept(update, now)
        accepted = "late" if staleness > 0 else "in time"
        self.traffic.updates[accepted if verdict.kind == "accepted" else verdict.kind] += 1
        if verdict.kind == "refused":
            self.refused[update.part, update.round].add(update.worker)
            self.expect(update.part)
        self.check(update.part, now)

    def check(self, part: str, now: float) -> None:
        """Close the open round if it is due, else schedule a check for when it is."""
        while self.ledger.round(part) < self.settings.rounds and (due := self.ledger.due_at(part)) is not None:
            if due > now:
                self.at(due, partial(self.check, part))
                return
            merged = self.ledger.close(part, now, self.loss)
            self.traffic.seconds = max(self.traffic.seconds, now)
            self.traffic.updates.update(["left out"] * len(merged.left_out))
            self.expect(part)
            waiting, self.waiting = self.waiting, []
            for worker in waiting:
                worker.resume(now)


class VirtualWorker:
    """One replica of one part."""

    def __init__(self, spec: RunSpec, index: int, replica: int, corpus: Corpus, engine: Simulation) -> None:
        self.engine, self.settings, self.index, self.replica = engine, spec.config.rounds, index, replica
        self.lies = replica >= self.settings.replicas - engine.fleet.liars
        task = spec.task(index, corpus, replica_seed(spec.config.seed, replica))
        self.learner = Learner(task, spec.config)
        self.part = spec.parts[index]
        self.name = f"{self.part}-{replica}"
        # Features made in this round, as they arrive.
        self.format, self.made = FeatureFormat.of(spec.config), list[Tensor]()
        if sends_features(spec.config, index):
            task.neighbours.send = lambda _, made: self.made.append(self.format.decode(self.format.encode(made)))
        self.rounds = WorkerRounds(WorkerProgress(self.part), self.settings)
        # Number of updates handed in, which gives a repeated round its own id; and the id of the last update.
        self.count, self.sent = 0, ""
        # Versions of its copies of other parts.
        self.seen: dict[str, int] = {}
        self.learner.load(self.rounds.begin(0, 0, engine.ledger.weights(self.part)))
        self._count_down(whole=True)

    def train(self, now: float) -> None:
        """Train the real steps of a round, in virtual time."""
        progress, steps = self.rounds.progress, self.settings.steps_per_round
        if self.rounds.in_round >= self.settings.rounds or self.name in self.engine.ledger.expelled([self.part]):
            return
        if (now := self.receive_features(now)) == math.inf:
            return
        self.engine.ledger.begin(self.part, 0.0)  # the first round began then
        self.load_copies()
        self.learner.train(self.rounds.in_round * steps, steps)
        progress.steps, progress.sequences = steps, steps * self.learner.config.sequences
        seconds = self.engine.fleet.training_s(self.replica, steps)
        self.engine.traffic.busy_s += seconds
        self.send_features(now)
        self.engine.at(now + seconds, self.submit)

    def load_copies(self) -> None:
        """Load the newest copies of the other parts that this one trains with."""
        ledger, needs = self.engine.ledger, self.learner.part.copies
        for part in needs:
            newest, weights = ledger.round(part), ledger.weights(part)
            if (held := self.seen.get(part)) != newest:
                differences = route(held, newest, partial(ledger.difference, part), weights)
                self.engine.traffic.copies_bytes += sum(map(len, differences.values())) or whole_size(weights)
            self.seen[part] = newest
        load_copies(self.learner.part, {part: ledger.weights(part) for part in needs})

    def receive_features(self, now: float) -> float:
        """The earliest start of a round whose features arrive during it; infinite if the worker gets a call instead."""
        if not reads_features(self.learner.config, self.index):
            return now
        if (found := self.engine.passed.pop((self.index, self.replica), None)) is None:
            self.engine.unfed[self.index, self.replica] = self
            return math.inf
        there, features = found
        first = self.rounds.in_round * self.settings.steps_per_round
        self.learner.part.neighbours.read = lambda step: features[step - first]
        self.engine.traffic.features_bytes += self.format.size
        return max(now, there)

    def send_features(self, now: float) -> None:
        """Let the next part read the features of a round that began now."""
        if not sends_features(self.learner.config, self.index):
            return
        fleet, next_ = self.engine.fleet, (self.index + 1, self.replica)
        trips_s = fleet.up_s(self.format.step_bytes) + fleet.down_s(self.format.step_bytes)
        there = now + fleet.training_s(self.replica, 1) + trips_s
        self.engine.passed[next_], self.made = (there, self.made), []
        if (waiting := self.engine.unfed.pop(next_, None)) is not None:
            self.engine.at(there, waiting.train)

    def submit(self, now: float) -> None:
        """Send the round's update."""
        engine = self.engine
        self.rounds.finish(self.learner.weights(), {}, self.name)
        payload, sent = self.rounds.payload, self.rounds.progress.pending or {}
        engine.traffic.up_bytes += len(payload)
        delta = CODECS[self.settings.up_codec(sent["round"])].decode(payload, engine.spec.shapes[self.part])
        sent["id"] = f"{self.name}-{sent['round']}-{self.count}"
        delta = scale(delta, engine.fleet.lie) if self.lies else delta
        update = Update(worker=self.name, part=self.part, delta=delta, **sent)
        self.sent = update.id
        self.count += 1
        fate = engine.fleet.fate(engine.spec.config.seed, self.part, update.id)
        there = now + engine.fleet.up_s(len(payload))
        if fate == "late":
            there += engine.fleet.late_rounds * engine.fleet.training_s(0, self.settings.steps_per_round)
        if fate == "lost":
            engine.traffic.updates["lost"] += 1
        else:
            engine.at(there, partial(engine.arrive, update))
        engine.at(there, self.resume)

    def resume(self, now: float) -> None:
        """Begin the next round, or wait for one."""
        engine, progress = self.engine, self.rounds.progress
        newest = engine.ledger.round(self.part)
        if progress.finished + 1 > newest or not engine.may_begin(self.index, newest):
            engine.waiting.append(self)
            return
        missed = newest - progress.base_version
        weights = engine.ledger.weights(self.part)
        self.learner.load(self.rounds.begin(max(progress.finished + 1, newest), newest, weights))
        size = self._count_down(whole=missed > 1) if missed else 0
        engine.at(now + engine.fleet.down_s(size), self.train)

    def retry(self, now: float) -> None:
        """Train the open round again, unless this worker's update for it has arrived."""
        engine, newest = self.engine, self.engine.ledger.round(self.part)
        if engine.ledger.version_with(self.part, self.sent, self.name):
            engine.waiting.append(self)
            return
        self.learner.load(self.rounds.begin(newest, newest, engine.ledger.weights(self.part)))
        engine.at(now, self.train)

    def _count_down(self, whole: bool) -> int:
        codec = CODECS["fp32" if whole else self.settings.down_codec]
        size = codec.size(self.engine.spec.shapes[self.part])
        self.engine.traffic.down_bytes += size
        return size
