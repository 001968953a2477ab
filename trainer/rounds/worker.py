"""A worker: trains one part, hands in what it learned at the end of each round, and goes on.

Its main thread trains, one beats, and where the settings let it go on while its update travels, one sends. All that it
needs to go on after a kill is in one file; see trainer/rounds/worker_state.py.
"""

from __future__ import annotations

import hashlib
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from stages.checkpoint import replace_file
from stages.errors import ConfigError, Interrupted, ResumeError, ServiceError
from stages.manifest import MANIFEST_NAME, read_manifest
from trainer.config import parse_config
from trainer.data import Corpus
from trainer.lock import exclusive
from trainer.rounds.client import FileGoneError, LeaseLostError, Link
from trainer.rounds.codec import codec_named
from trainer.rounds.feedback import ErrorFeedback
from trainer.rounds.holdings import Holdings
from trainer.rounds.learner import Learner
from trainer.rounds.overlap import new_overlap
from trainer.rounds.pace import Pace
from trainer.rounds.plan import DATA_KIND, RunPlan
from trainer.rounds.pulse import Pulse
from trainer.rounds.shards import replica_seed
from trainer.rounds.tensors import Tensors, norm, shapes, subtract
from trainer.rounds.worker_state import STATE_NAME, Pending, Standing, load_worker, save_worker
from trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

MODULE, OPTIMIZER = "module", "optimizer"
BASE, HELD, OWN, CARRIED, OVERLAP = "base", "held", "own", "carried", "overlap"
"""Groups of a worker's state: weights and inner optimizer; where its round began, the version that it holds, its last
pseudo-gradient, what its codec rounded away, and what the overlap remembers."""
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
        self._sending: Future[rounds_pb2.Verdict] | None = None
        # before the model is built: on a busy machine that can take longer than a lease
        self.pulse = Pulse(link, place.lease_seconds, self._report)
        try:
            self._build(corpus)
        except BaseException:
            self.close()
            raise
        log.info("%s: %s, replica %d of run %s", settings.name, self.part, place.replica, self.run[:12])

    def _build(self, corpus: Corpus) -> None:
        place, link = self.place, self.link
        self.plan = _plan(place, self.settings.state, corpus)
        if place.part >= len(self.plan.parts):
            raise ServiceError(f"{link.address} gives part {place.part} of {len(self.plan.parts)}: it is damaged")
        self.part = self.plan.parts[place.part]
        self.standing = Standing(self.part)
        rounds = self.plan.config.rounds
        seed = replica_seed(self.plan.config.seed, place.replica)
        self.learner = Learner(self.plan.frame.task(place.part, corpus, seed), self.plan.config)
        self.like = {name: shapes(tensors) for name, tensors in self.plan.frame.initial().items()}
        self.feedback, self.overlap = ErrorFeedback(codec_named(rounds.codec)), new_overlap(rounds)
        self.base, self.own = Tensors(), Tensors()
        state = self.settings.state
        self.holdings = Holdings(link, self.settings.name, place.lease, state, self.like, rounds.down_codec)

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
        except (KeyError, ValueError, RuntimeError) as error:
            raise ResumeError(f"the state in {self.settings.state} does not fit this run ({error})") from None
        self.standing = standing
        self.base, self.own = groups.get(BASE, groups.get(HELD, {})), groups.get(OWN, {})
        self.feedback.carried = groups.get(CARRIED, {})
        self.overlap.restore(groups.get(OVERLAP, {}))
        if HELD in groups:
            self.holdings.held[self.part] = (standing.held_version, groups[HELD])

    def state(self) -> dict[str, Tensors]:
        held = self.holdings.held.get(self.part, (0, {}))[1]
        groups = {HELD: held, OWN: self.own, CARRIED: self.feedback.carried, OVERLAP: self.overlap.state()}
        if self.base is not held and self.standing.round is not None:
            groups[BASE] = self.base
        groups |= {MODULE: self.learner.weights(), OPTIMIZER: self.learner.optimizers.tensors()}
        return {name: tensors for name, tensors in groups.items() if tensors}

    def save(self) -> None:
        """Raises CheckpointError, with the last state whole."""
        self.standing.held_version = self.holdings.held.get(self.part, (0, {}))[0]
        save_worker(self.settings.state / STATE_NAME, self.run, self.standing, self.state())
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
            self._hand_in()
            self.doing = rounds_pb2.DOING_WAITING
            answer = self.link.next(self._question())
            if answer.WhichOneof("next") == "end":
                self._settle()
                self.leave()
                return
            if answer.WhichOneof("next") != "order":
                continue
            try:
                self._round(answer.order)
            except FileGoneError as error:  # most likely a newer version is there
                log.info("%s", error)
                time.sleep(AGAIN_S)

    def _question(self) -> rounds_pb2.NextRequest:
        held = [rounds_pb2.Held(part=part, version=number) for part, (number, _) in self.holdings.held.items()]
        after = self.standing.finished if self.standing.finished >= 0 else None
        return rounds_pb2.NextRequest(worker=self.settings.name, lease=self.place.lease, after=after, held=held)

    def _round(self, order: rounds_pb2.Order) -> None:
        self.doing = rounds_pb2.DOING_FETCHING
        self._see(order)
        if not self._goes_on(order.round):
            self._begin(order)
        while self.standing.steps < self.standing.steps_due:
            if not self._may_go_on():
                return
            self._step()
        self._finish()

    def _goes_on(self, open_round: int) -> bool:
        """Whether a round that was interrupted is still worth its end."""
        if self.standing.round is None:
            return False
        behind = open_round - self.standing.round
        return behind <= 0 or self._counts_late(behind)

    def _counts_late(self, behind: int) -> bool:
        rounds = self.plan.config.rounds
        return rounds.late != "drop" and behind <= rounds.max_staleness

    def _begin(self, order: rounds_pb2.Order) -> None:
        """Raises ServiceError for an order that makes no sense, FileGoneError."""
        if order.base.part != self.part or not 1 <= order.steps <= self.plan.config.rounds.steps_per_round:
            raise ServiceError(
                f"{self.link.address} orders {order.steps} steps of {order.base.part[:40]!r}: it is damaged"
            )
        weights, standing = self.holdings.fetch(order.base), self.standing
        merged = standing.own_in is not None and order.base.version >= standing.own_in
        self.base = self.overlap.start(weights, self.own or None, merged)
        self.learner.load(self.base)
        self.standing.round, self.standing.base_version = order.round, order.base.version
        self.standing.steps, self.standing.steps_due = 0, order.steps

    def _see(self, order: rounds_pb2.Order) -> None:
        """Take newer copies of other parts. Raises ServiceError, FileGoneError."""
        if {wanted.part for wanted in order.copies} != set(self.learner.part.needs):
            raise ServiceError(f"{self.link.address} does not send what {self.part} is trained with: it is damaged")
        published = {wanted.part: self.holdings.fetch(wanted) for wanted in order.copies}
        if published:
            self.learner.part.see(published)

    def _may_go_on(self) -> bool:
        """Whether this round is still worth training. Raises Interrupted, LeaseLostError."""
        if self.link.asked_to_stop():
            raise Interrupted(f"{self.part}: stopped in round {self.standing.round}; run again to go on")
        if self.pulse.lost:
            raise LeaseLostError(f"{self.part} went to another worker, or the coordinator began anew; joining again")
        assert self.standing.round is not None
        behind = self.pulse.open_round - self.standing.round
        if self.pulse.ended or (behind > 0 and not self._counts_late(behind)):
            log.warning("round %d was closed without us: it is given up", self.standing.round)
            self.standing.finished, self.standing.round = self.standing.round, None
            return False
        return True

    def _step(self) -> None:
        assert self.standing.round is not None
        self.doing, begin = rounds_pb2.DOING_TRAINING, time.monotonic()
        first = self.standing.round * self.plan.config.rounds.steps_per_round
        with self.settings.pace.step(self.place.replica):
            record = self.learner.train(first + self.standing.steps, 1)
        self.losses = {name: nats for name, nats in record.items() if name.endswith("nats")}
        self.standing.steps += 1
        self.busy_s += time.monotonic() - begin
        if time.monotonic() - self._saved_at > self.settings.save_every_s:
            self.save()

    def _finish(self) -> None:
        """The round's update, safe on the disk before anybody hears of it."""
        self._settle()
        assert self.standing.round is not None
        delta = subtract(self.base, self.learner.weights())
        if not norm(delta) < float("inf"):
            raise ConfigError(f"{self.part}: weights are not finite after round {self.standing.round}; lower the rates")
        payload = self.feedback.encode(delta)
        steps, round_ = self.standing.steps, self.standing.round
        self.standing.pending = Pending(
            id=_submission_id(self.run, self.settings.name, self.part, round_, payload),
            round=round_,
            base_version=self.standing.base_version,
            steps=steps,
            sequences=steps * self.plan.config.sequences,
            losses=self.losses,
            payload=payload,
        )
        if not self.overlap.waits:  # what the others get of it
            self.own = self.feedback.codec.decode(payload, self.like[self.part])
        self.standing.own_in = None
        self.standing.finished, self.standing.round = round_, None
        self.trained += 1
        self.save()

    # Handing in

    def _hand_in(self) -> None:
        """Send what is pending: here, or beside the next round where the settings let us go on."""
        if self.standing.pending is None or self._sending is not None:
            return
        self.doing = rounds_pb2.DOING_SENDING
        self._sending = self._sender.submit(self._submit, self.standing.pending)
        if self.overlap.waits:
            self._settle()

    def _settle(self) -> None:
        """Wait until what is being sent was judged. Raises LeaseLostError, Interrupted, ServiceError."""
        if self._sending is None:
            return
        try:
            verdict = self._sending.result()
        finally:
            self._sending = None
        pending, self.standing.pending = self.standing.pending, None
        assert pending is not None
        if verdict.outcome == rounds_pb2.OUTCOME_REFUSED:
            log.warning("round %d of %s was not taken: %s", pending.round, self.part, verdict.reason)
        else:
            log.info("round %d of %s is handed in", pending.round, self.part)
            self.standing.own_in = verdict.version or None

    def _submit(self, pending: Pending) -> rounds_pb2.Verdict:
        submission = rounds_pb2.Submission(
            worker=self.settings.name,
            lease=self.place.lease,
            id=pending.id,
            round=pending.round,
            base_version=pending.base_version,
            steps=pending.steps,
            sequences=pending.sequences,
            losses=pending.losses,
            codec=self.feedback.codec.name,
            size=len(pending.payload),
            sha256=hashlib.sha256(pending.payload).digest(),
        )
        return self.link.submit(submission, pending.payload)

    def _report(self) -> rounds_pb2.BeatRequest:
        standing = self.standing
        return rounds_pb2.BeatRequest(
            worker=self.settings.name,
            lease=self.place.lease,
            doing=self.doing,
            round=max(standing.finished, 0) if standing.round is None else standing.round,
            steps=standing.steps,
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


def _submission_id(run: str, worker: str, part: str, round_: int, payload: bytes) -> str:
    """The same in every try; another for other work."""
    word = hashlib.sha256(f"{run} {worker} {part} {round_} {hashlib.sha256(payload).hexdigest()}".encode())
    return f"r{round_}-{word.hexdigest()[:32]}"
