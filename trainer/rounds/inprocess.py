"""Rounds in one process: the training is real, time and links are not. The ledger is the coordinator's."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from trainer.data import Corpus
from trainer.rounds.codec import codec_named
from trainer.rounds.copies import CopyLine
from trainer.rounds.feature_reader import FeatureReader, names_before
from trainer.rounds.feedback import ErrorFeedback
from trainer.rounds.fleet import Fleet
from trainer.rounds.fragments import boundaries
from trainer.rounds.frame import Frame
from trainer.rounds.learner import Learner
from trainer.rounds.ledger import Ledger
from trainer.rounds.overlap import new_overlap
from trainer.rounds.parts import FedPart
from trainer.rounds.settings import RoundSettings
from trainer.rounds.shards import replica_seed
from trainer.rounds.store import Store
from trainer.rounds.tensors import Tensors, shapes, subtract
from trainer.rounds.update import Update


@dataclass
class Traffic:
    """What the links carried, and what became of the updates."""

    up_bytes: int = 0
    down_bytes: int = 0
    """Of the parts that a worker trains."""
    copies_bytes: int = 0
    """Of the copies that it has of others."""
    features_bytes: int = 0
    """Of the features that it reads instead."""
    updates: Counter[str] = field(default_factory=Counter)
    """By what became of them: in time, late, dropped, refused, lost."""
    busy_s: float = 0.0
    """Virtual seconds of all workers that were spent on training."""
    seconds: float = 0.0
    """Virtual, until the last round was closed."""


class Engine:
    """Parts times replicas, moved by a queue of events in virtual time; everything in it is deterministic."""

    def __init__(self, frame: Frame, corpus: Corpus, store: Store, fleet: Fleet) -> None:
        self.frame, self.settings, self.fleet = frame, frame.config.rounds, fleet
        self.codec = codec_named(self.settings.codec)
        self.cutting = frame.cutting()
        parts = self.cutting.pieces(frame.initial())
        self.ledger = Ledger(self.settings, parts, store, frame.identity(corpus))
        self.copies = {name: CopyLine(self.settings, 0, weights) for name, weights in parts.items()}
        self.reader = FeatureReader(frame, corpus) if self.settings.context_by == "features" else None
        self.traffic = Traffic()
        self.workers = [
            VirtualWorker(frame, index, replica, corpus, self)
            for index in range(len(self.cutting.parts))
            for replica in range(self.settings.replicas)
        ]
        self.waiting: list[VirtualWorker] = []
        self.handed_in: set[tuple[str, str, int]] = set()
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._events = 0

    def run(self) -> Traffic:
        """Train until every part has made its last round. Raises what training raises."""
        for worker in self.workers:
            self.at(0.0, worker.train)
        while self._queue or self.waiting:
            if not self._queue:  # nobody would ever hand in: all updates of a round were lost
                waiting, self.waiting = self.waiting, []
                for worker in waiting:
                    worker.try_again(self.traffic.seconds)
            now, _, action = heapq.heappop(self._queue)
            action(now)
        return self.traffic

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Do that then; what comes at the same time is done in the order of the calls."""
        heapq.heappush(self._queue, (time, self._events, action))
        self._events += 1

    def published(self) -> dict[str, Tensors]:
        """The newest weights of every part, whole."""
        return {part: self.cutting.whole(part, self.ledger.weights) for part in self.cutting.parts}

    def arrive(self, update: Update, now: float) -> None:
        staleness = self.ledger.round(update.part) - update.round
        verdict = self.ledger.accept(update, now)
        accepted = "late" if staleness > 0 else "in time"
        self.traffic.updates[accepted if verdict.kind == "accepted" else verdict.kind] += 1
        if verdict.kind == "accepted":
            self.handed_in.add((update.worker, update.part, update.round))
        self.check(update.part, now)

    def check(self, part: str, now: float) -> None:
        """Close the open round if it is due, else come again when it will be."""
        while self.ledger.round(part) < self.settings.rounds and self.ledger.due(part, now):
            merged = self.ledger.close(part, now)
            self.traffic.seconds = max(self.traffic.seconds, now)
            for worker in self.workers:
                worker.hear(merged.updates)
            waiting, self.waiting = self.waiting, []
            for worker in waiting:
                worker.go_on(now)
        due = self.ledger.due_at(part)
        if due is not None and due > now and self.ledger.round(part) < self.settings.rounds:
            self.at(due, partial(self.check, part))


class Piece:
    """What a worker knows of one fragment."""

    def __init__(self, name: str, base: Tensors, settings: RoundSettings) -> None:
        """:param base: weights that it begins with."""
        self.name, self.base = name, base
        self.feedback = ErrorFeedback(codec_named(settings.codec))
        self.overlap = new_overlap(settings)
        self.round = self.version = self.steps = 0
        self.count = 0
        """Updates handed in, so that a round made again has an id of its own."""
        self.own: Tensors | None = None
        self.sent, self.merged = "", False


class VirtualWorker:
    """One replica of one part. Each fragment goes through rounds of its own; with one, that is the whole part."""

    def __init__(self, frame: Frame, index: int, replica: int, corpus: Corpus, engine: Engine) -> None:
        self.engine, self.settings, self.index, self.replica = engine, frame.config.rounds, index, replica
        self.seed = replica_seed(frame.config.seed, replica)
        task = frame.task(index, corpus, self.seed)
        self.learner = Learner(task, frame.config)
        self.part = frame.names()[index]
        self.name = f"{self.part}-{replica}"
        self.after = boundaries(self.settings.steps_per_round, self.settings.fragments)
        self.pieces = [
            Piece(name, engine.ledger.weights(name), self.settings) for name in engine.cutting.parts[self.part]
        ]
        self.turn = 0
        self.seen: dict[str, int] = {}
        """Which copies of others it has, by fragment."""
        for piece in self.pieces:
            self.learner.load(piece.base)
            self._count_down(piece, whole=True)

    def train(self, now: float) -> None:
        """Real steps until the next exchange, in virtual time."""
        piece = self.pieces[self.turn]
        if piece.round >= self.settings.rounds:
            if any(other.round < self.settings.rounds for other in self.pieces):
                self.turn = (self.turn + 1) % len(self.pieces)
                self.train(now)
            return
        if self.turn == 0 and self.learner.part.needs:
            self.see_copies()
        if isinstance(self.learner.part, FedPart):
            self.be_fed(self.learner.part)
        begin = self.after[self.turn - 1] if self.turn else 0
        steps = self.after[self.turn] - begin
        self.learner.train(piece.round * self.settings.steps_per_round + begin, steps)
        for other in self.pieces:
            other.steps += steps
        seconds = self.engine.fleet.training_s(self.replica, steps)
        self.engine.traffic.busy_s += seconds
        self.engine.at(now + seconds, self.hand_in)

    def see_copies(self) -> None:
        """Take the newest copies of the parts that this one is trained with."""
        cutting, copies = self.engine.cutting, self.engine.copies
        for fragment in (piece for part in self.learner.part.needs for piece in cutting.parts[part]):
            line = copies[fragment]
            line.follow(self.engine.ledger.round(fragment), self.engine.ledger.weights(fragment))
            self.engine.traffic.copies_bytes += line.size(self.seen.get(fragment))
            self.seen[fragment] = line.number
        whole = {part: cutting.whole(part, lambda name: copies[name].tensors) for part in self.learner.part.needs}
        self.learner.part.see(whole)

    def be_fed(self, part: FedPart) -> None:
        """Read, until the next round, what the newest blocks before make of the text; they read it when it is due."""
        reader = self.engine.reader
        assert reader is not None
        reader.take({name: self.engine.ledger.weights(name) for name in names_before(self.index)})
        part.feed(lambda step: reader.format.decode(reader.payload(self.index, self.seed, step)))
        self.engine.traffic.features_bytes += reader.format.size

    def hand_in(self, now: float) -> None:
        """Send what was learned of the fragment whose turn it is; wait, or do not."""
        engine, piece = self.engine, self.pieces[self.turn]
        weights = self.learner.weights()
        payload = piece.feedback.encode(subtract(piece.base, {key: weights[key] for key in piece.base}))
        engine.traffic.up_bytes += len(payload)
        piece.own = engine.codec.decode(payload, shapes(piece.base))
        update = Update(
            id=f"{self.name}-{piece.round}-{piece.count}",
            worker=self.name,
            part=piece.name,
            base_version=piece.version,
            round=piece.round,
            steps=min(piece.steps, self.settings.steps_per_round),
            sequences=piece.steps * self.learner.config.sequences,
            delta=piece.own,
        )
        piece.sent, piece.merged, piece.steps = update.id, False, 0
        piece.count += 1
        fate = engine.fleet.fate(piece.name, update.id)
        there = now + engine.fleet.up_s(len(payload))
        if fate == "late":
            there += engine.fleet.late_rounds * engine.fleet.training_s(0, self.settings.steps_per_round)
        if fate == "lost":
            engine.traffic.updates["lost"] += 1
        else:
            engine.at(there, partial(engine.arrive, update))
        if piece.overlap.waits:
            engine.at(there, self.go_on)
        else:
            self.go_on(now)

    def hear(self, merged: tuple[str, ...]) -> None:
        for piece in self.pieces:
            piece.merged = piece.merged or piece.sent in merged

    def go_on(self, now: float) -> None:
        """Begin the next round of the fragment, or wait until there is one to begin."""
        engine, piece = self.engine, self.pieces[self.turn]
        newest = engine.ledger.round(piece.name)
        if piece.round + 1 > newest + self.settings.ahead:
            engine.waiting.append(self)
            return
        piece.base = piece.overlap.start(engine.ledger.weights(piece.name), piece.own, piece.merged)
        missed, piece.version = newest - piece.version, newest
        piece.round = max(piece.round + 1, newest)
        self.learner.load(piece.base)
        size = self._count_down(piece, whole=missed > 1) if missed else 0
        self.turn = (self.turn + 1) % len(self.pieces)
        engine.at(now + (0.0 if self.settings.ahead else engine.fleet.down_s(size)), self.train)

    def try_again(self, now: float) -> None:
        """Train the open round once more, unless this worker's update of it has come."""
        engine, piece = self.engine, self.pieces[self.turn]
        piece.round = piece.version = engine.ledger.round(piece.name)
        if (self.name, piece.name, piece.round) in engine.handed_in:
            engine.waiting.append(self)
            return
        piece.base = engine.ledger.weights(piece.name)
        self.learner.load(piece.base)
        engine.at(now, self.train)

    def _count_down(self, piece: Piece, whole: bool) -> int:
        codec = codec_named("fp32" if whole else self.settings.down_codec)
        size = codec.size(shapes(piece.base))
        self.engine.traffic.down_bytes += size
        return size
