"""A worker: trains one part, hands in what it learned at the end of each round, and goes on.

Its main thread trains, one beats, and where the settings let it go on while its update travels, one sends. All that it
needs to go on after a kill is in one file; see trainer/rounds/worker_state.py.
"""

from __future__ import annotations

import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

from stages.checkpoint import replace_file
from stages.errors import ConfigError, Interrupted, ResumeError, ServiceError
from stages.manifest import MANIFEST_NAME, read_manifest
from trainer.config import parse_config
from trainer.data import Corpus
from trainer.lock import exclusive
from trainer.rounds.client import FileGoneError, LeaseLostError, Link
from trainer.rounds.device import PlacedCorpus, place_on
from trainer.rounds.feed import Feed
from trainer.rounds.fragments import boundaries
from trainer.rounds.holdings import Holdings
from trainer.rounds.learner import Learner
from trainer.rounds.pace import Pace
from trainer.rounds.piece import Piece
from trainer.rounds.plan import DATA_KIND, RunPlan
from trainer.rounds.pulse import Pulse
from trainer.rounds.shards import replica_seed
from trainer.rounds.tensors import Tensors
from trainer.rounds.worker_state import STATE_NAME, Pending, Standing, load_worker, save_worker
from trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

MODULE, OPTIMIZER = "module", "optimizer"
"""Groups of a worker's state, beside those of its pieces: weights and inner optimizer."""
AGAIN_S = 0.2
LOCK_NAME = "worker.lock"


@dataclass(frozen=True)
class WorkerSettings:
    """What `onesweep work` is told."""

    name: str
    state: Path
    """A directory of this worker alone."""
    part: int | None = None
    wait: bool = False
    """Whether to wait for a place."""
    device: str = "cpu"
    save_every_s: float = 60.0
    architecture: str = ""
    """Digest of the one that the run must have; empty = any."""
    pace: Pace = field(default_factory=Pace)


def work(link: Link, corpus: Corpus, settings: WorkerSettings) -> int:
    """Work until the run is over; returns how many rounds were trained. Raises OnesweepError."""
    try:
        settings.state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot keep a worker's state in {settings.state}: {error.strerror}") from None
    with exclusive(
        settings.state / LOCK_NAME, f"another worker has its state in {settings.state}: give another --state"
    ):
        run, standing, groups = "", Standing(""), dict[str, Tensors]()
        if (path := settings.state / STATE_NAME).exists():
            run, standing, groups = load_worker(path)
        trained = 0
        while True:
            place = link.join(_request(corpus, settings, run), settings.wait)
            worker = Worker(link, corpus, settings, place)
            worker.restore(run, standing, groups)
            groups = {}  # what came of it is the worker's; there is no room for both
            try:
                worker.work()
                return trained + worker.trained
            except LeaseLostError as error:
                log.warning("%s", error)
                run, standing, groups, trained = worker.run, worker.standing, worker.state(), trained + worker.trained
            except Interrupted:
                worker.save()
                worker.leave()
                raise
            finally:
                worker.close()


class Worker:
    """One place of a run, for as long as this process has it."""

    def __init__(self, link: Link, corpus: Corpus, settings: WorkerSettings, place: rounds_pb2.JoinResponse) -> None:
        """Raises OnesweepError where the coordinator's settings make no sense here."""
        self.link, self.settings, self.place, self.run = link, settings, place, place.run
        self.standing, self.doing = Standing(""), rounds_pb2.DOING_WAITING
        self.losses: dict[str, float] = {}
        self.joined_s, self.busy_s = time.monotonic(), 0.0
        self.trained = 0
        self._saved_at = time.monotonic()
        self._sender = ThreadPoolExecutor(1, "sender")
        # before the model is built: on a busy machine that can take longer than a lease
        self.pulse = Pulse(link, place.lease_seconds, self._report)
        try:
            self._build(corpus)
        except BaseException:
            self.close()
            raise
        log.info("%s: %s, replica %d of run %s", settings.name, self.part, place.replica, self.run[:12])

    def _build(self, corpus: Corpus) -> None:
        place, link, settings = self.place, self.link, self.settings
        self.plan = _plan(place, settings.state, corpus)
        if place.part >= len(self.plan.parts):
            raise ServiceError(f"{link.address} gives part {place.part} of {len(self.plan.parts)}: it is damaged")
        self.part = self.plan.parts[place.part]
        rounds, cutting = self.plan.config.rounds, self.plan.cutting
        seed = replica_seed(self.plan.config.seed, place.replica)
        placed = PlacedCorpus(corpus.name, corpus.train, corpus.valid, settings.device)
        task = place_on(self.plan.frame.task(place.part, placed, seed), settings.device)
        self.learner = Learner(task, self.plan.config)
        names = cutting.parts[self.part]
        self.pieces = [Piece(i, name, cutting.like[name], rounds) for i, name in enumerate(names)]
        self.after = [0, *boundaries(rounds.steps_per_round, rounds.fragments)]
        self.standing = Standing(self.part, pieces=[piece.standing for piece in self.pieces])
        self.holdings = Holdings(link, settings.name, place.lease, settings.state, cutting.like)
        self.feed = Feed(link, settings.name, place, settings.state, task, self.plan.config)

    # State

    def restore(self, run: str, standing: Standing, groups: dict[str, Tensors]) -> None:
        """Go on from an earlier state, if it is of this part. Raises ResumeError."""
        if run != self.run or standing.part != self.part:
            if standing.part:
                log.warning("what was saved is of %s, not %s: it is left behind", standing.part, self.part)
            return
        try:
            self.learner.load(groups[MODULE])
            self.learner.optimizers.restore(groups.get(OPTIMIZER, {}))
            for piece, saved in zip(self.pieces, standing.pieces, strict=True):
                if (held := piece.restore(saved, groups)) is not None:
                    self.holdings.held[piece.name] = held
        except (KeyError, ValueError, RuntimeError) as error:
            raise ResumeError(f"the state in {self.settings.state} does not fit this run ({error})") from None
        self.standing = standing

    def state(self) -> dict[str, Tensors]:
        groups = {MODULE: self.learner.weights(), OPTIMIZER: self.learner.optimizers.tensors()}
        for piece in self.pieces:
            for name, tensors in piece.state(self.holdings.held.get(piece.name)).items():
                groups[name] = groups.get(name, {}) | tensors
        return {name: tensors for name, tensors in groups.items() if tensors}

    def save(self) -> None:
        """Raises CheckpointError, with the last state whole."""
        groups = self.state()
        save_worker(self.settings.state / STATE_NAME, self.run, self.standing, groups)
        self._saved_at = time.monotonic()

    def leave(self) -> None:
        """Give the place back."""
        self.pulse.stop()
        self.link.leave(rounds_pb2.LeaveRequest(worker=self.settings.name, lease=self.place.lease))

    def close(self) -> None:
        self.pulse.stop()
        self._sender.shutdown(wait=False, cancel_futures=True)

    # Rounds

    def work(self) -> None:
        """Round after round, to the end of the run. Raises OnesweepError; LeaseLostError when the place is gone."""
        while True:
            for piece in self.pieces:
                if not piece.standing.over and not (piece.oriented and piece.standing.round is not None):
                    self._begin(piece)
            if all(piece.standing.over for piece in self.pieces):
                break
            piece = self.pieces[self.standing.turn]
            if piece.standing.over:
                self._next_turn()
            elif self._train(piece):
                self._exchange(piece)
        for piece in self.pieces:
            self._settle(piece)
        self.leave()

    def _begin(self, piece: Piece) -> None:
        """Hand in what a fragment has learned, and begin its next round, or go on with the one that it is in."""
        if piece.overlap.waits:
            self._hand_in(piece)
            self._settle(piece)
        while not piece.oriented or (piece.standing.round is None and not piece.standing.over):
            self.doing = rounds_pb2.DOING_WAITING
            request = rounds_pb2.NextRequest(
                worker=self.settings.name,
                lease=self.place.lease,
                fragment=piece.index,
                after=piece.standing.finished if piece.standing.finished >= 0 else None,
                held=self.holdings.told(),
            )
            # who goes on at once does so from what there is before its own update comes
            answer = self.link.next(request, partial(self._hand_in, piece))
            if answer.WhichOneof("next") != "pause":
                piece.oriented = self._take(piece, answer)

    def _take(self, piece: Piece, answer: rounds_pb2.NextResponse) -> bool:
        """Do as the coordinator says; False where it has to be asked again."""
        if answer.WhichOneof("next") == "end":
            piece.standing.over = True
            return True
        self.doing, order = rounds_pb2.DOING_FETCHING, answer.order
        try:
            self._see(piece, order)
            if not (piece.goes_on(order.round) and self.feed.resumes(piece.standing.round)):
                self._start(piece, order)
        except FileGoneError as error:  # most likely a newer version is there
            log.info("%s", error)
            time.sleep(AGAIN_S)
            return False
        return True

    def _start(self, piece: Piece, order: rounds_pb2.Order) -> None:
        """Raises ServiceError for an order that makes no sense, FileGoneError."""
        rounds = self.plan.config.rounds
        due = rounds.steps_per_round if order.round < rounds.rounds else 0
        if order.base.part != piece.name or order.steps != due:
            raise ServiceError(
                f"{self.link.address} orders {order.steps} steps of {order.base.part[:40]!r}: it is damaged"
            )
        self.feed.take(order)
        weights = self.holdings.fetch(order.base, rounds.down_codec)
        if piece.sending is not None and piece.sending.done():  # who is patient asked for the order meanwhile
            self._settle(piece)  # it may be part of these weights
        self.learner.load(piece.begin(order.round, order.base.version, weights))
        if piece.index == self.standing.turn:
            self.standing.steps = 0
        if not due:  # the last weights of a fragment, with which the others are trained on
            piece.give_up()
            piece.standing.over = True

    def _see(self, piece: Piece, order: rounds_pb2.Order) -> None:
        """Take newer copies of other parts, which come with the last fragment. Raises ServiceError, FileGoneError."""
        cutting, needs = self.plan.cutting, self.learner.part.needs
        due = {fragment for part in needs for fragment in cutting.parts[part]} if piece is self.pieces[-1] else set()
        if {wanted.part for wanted in order.copies} != due:
            raise ServiceError(f"{self.link.address} does not send what {self.part} is trained with: it is damaged")
        codec = self.plan.config.rounds.copies_codec
        copies = {wanted.part: self.holdings.fetch(wanted, codec) for wanted in order.copies}
        if copies:
            self.learner.part.see({part: cutting.whole(part, copies.__getitem__) for part in needs})

    def _train(self, piece: Piece) -> bool:
        """The steps up to a fragment's exchange; False where its round is given up."""
        begin, end = self.after[piece.index : piece.index + 2]
        while self.standing.steps < end - begin:
            if not self._may_go_on(piece):
                return False
            assert piece.standing.round is not None
            self._step(piece.standing.round * self.plan.config.rounds.steps_per_round + begin + self.standing.steps)
        return True

    def _may_go_on(self, piece: Piece) -> bool:
        """Whether its round is still worth training. Raises Interrupted, LeaseLostError."""
        if self.link.asked_to_stop():
            raise Interrupted(f"{self.part}: stopped in round {piece.standing.round}; run again to go on")
        if self.pulse.lost:
            raise LeaseLostError(f"{self.part} went to another worker, or the coordinator began anew; joining again")
        open_round = self.pulse.open_rounds[piece.index] if self.pulse.open_rounds else -1
        if self.pulse.ended or not piece.goes_on(open_round):
            log.warning("round %d of %s was closed without us: it is given up", piece.standing.round, piece.name)
            piece.give_up()
            self.standing.steps = 0
            return False
        return True

    def _step(self, number: int) -> None:
        self.doing, begin = rounds_pb2.DOING_TRAINING, time.monotonic()
        with self.settings.pace.step(self.place.replica):
            record = self.learner.train(number, 1)
        self.losses = {name: nats for name, nats in record.items() if name.endswith("nats")}
        self.standing.steps += 1
        for piece in self.pieces:
            piece.standing.steps += 1
        self.busy_s += time.monotonic() - begin
        if time.monotonic() - self._saved_at > self.settings.save_every_s:
            self.save()

    def _exchange(self, piece: Piece) -> None:
        """A round's update, safe on the disk before anybody hears of it; then it is the next fragment's turn."""
        self._settle(piece)
        author = f"{self.run} {self.settings.name}"
        piece.finish(self.learner.weights(), self.plan.config.sequences, self.losses, author)
        self.trained += piece is self.pieces[-1]
        self._next_turn()
        self.save()

    def _next_turn(self) -> None:
        self.standing.turn, self.standing.steps = (self.standing.turn + 1) % len(self.pieces), 0

    # Handing in

    def _hand_in(self, piece: Piece) -> None:
        """Let what is pending be sent."""
        if piece.standing.pending is None or piece.sending is not None:
            return
        self.doing = rounds_pb2.DOING_SENDING
        piece.sending = self._sender.submit(self._submit, piece.index, piece.standing.pending)

    def _settle(self, piece: Piece) -> None:
        """Wait until what is being sent was judged. Raises LeaseLostError, Interrupted, ServiceError."""
        if piece.sending is None:
            return
        try:
            verdict = piece.sending.result()
        finally:
            piece.sending = None
        pending, piece.standing.pending = piece.standing.pending, None
        assert pending is not None
        if verdict.outcome == rounds_pb2.OUTCOME_REFUSED:
            log.warning("round %d of %s was not taken: %s", pending.round, piece.name, verdict.reason)
        else:
            log.info("round %d of %s is handed in", pending.round, piece.name)
            piece.standing.own_in = verdict.version or None

    def _submit(self, fragment: int, pending: Pending) -> rounds_pb2.Verdict:
        submission = rounds_pb2.Submission(
            worker=self.settings.name,
            lease=self.place.lease,
            id=pending.id,
            fragment=fragment,
            round=pending.round,
            base_version=pending.base_version,
            steps=pending.steps,
            sequences=pending.sequences,
            losses=pending.losses,
            codec=self.plan.config.rounds.codec,
            size=len(pending.payload),
            sha256=hashlib.sha256(pending.payload).digest(),
        )
        return self.link.submit(submission, pending.payload)

    def _report(self) -> rounds_pb2.BeatRequest:
        piece = self.standing.pieces[self.standing.turn]
        return rounds_pb2.BeatRequest(
            worker=self.settings.name,
            lease=self.place.lease,
            doing=self.doing,
            round=max(piece.finished, 0) if piece.round is None else piece.round,
            steps=piece.steps,
            losses=self.losses,
            busy_seconds=self.busy_s,
            lived_seconds=time.monotonic() - self.joined_s,
        )


def _request(corpus: Corpus, settings: WorkerSettings, run: str) -> rounds_pb2.JoinRequest:
    return rounds_pb2.JoinRequest(
        worker=settings.name,
        version=version("onesweep"),
        part=settings.part,
        architecture=settings.architecture,
        data_kind=DATA_KIND,
        data=corpus.digest(),
        run=run,
        device=settings.device,
    )


def _plan(place: rounds_pb2.JoinResponse, directory: Path, corpus: Corpus) -> RunPlan:
    """What the coordinator says that the run is. Raises OnesweepError."""
    replace_file(directory / MANIFEST_NAME, lambda path: path.write_text(place.manifest, encoding="utf-8"))
    config = parse_config(place.config, "the coordinator's settings")
    plan = RunPlan.told(config, read_manifest(directory), corpus)
    if plan.run != place.run:
        raise ServiceError("the coordinator's settings are not those of the run that it names: another version?")
    return plan
