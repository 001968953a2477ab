"""A worker: trains one part, round after round, and hands in an update at the end of each round."""

# Its main thread trains, and another sends heartbeats. One file holds everything needed to resume after a kill.

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from stages.errors import CodecError, ConfigError, Interrupted, ResumeError, ServiceError, file_errors
from stages.wire.secret_files import exclusive
from stages.wire.status import protocol_refusal
from trainer.blocks.data import Corpus
from trainer.rounds.cache import INCOMING, FeatureClient, WeightCache
from trainer.rounds.client import FileGoneError, Heartbeat, LeaseLostError, RoundsClient, TakenOverError
from trainer.rounds.codecs import Tensors
from trainer.rounds.parts import load_copies
from trainer.rounds.settings import PROTOCOL, WorkerSettings
from trainer.rounds.spec import RunSpec
from trainer.rounds.worker_state import STATE_NAME, WorkerProgress, WorkerRounds, load_worker, save_worker
from trainer.v1 import rounds_pb2

if TYPE_CHECKING:
    from trainer.rounds.site import Site

log = logging.getLogger(__name__)

# Groups of a worker's state in addition to those of its rounds: weights and inner optimizer.
MODULE, OPTIMIZER = "module", "optimizer"
RETRY_S = 0.2
LOCK_NAME = "worker.lock"


def work(client: RoundsClient, corpus: Corpus, settings: WorkerSettings, site: Site | None = None) -> int:
    """Work until the run is over; returns the number of rounds trained. Raises OnesweepError.

    :param site: the site whose first machine this is.
    """
    with file_errors(ConfigError, f"cannot store a worker's state in {settings.state / INCOMING}"):
        (settings.state / INCOMING).mkdir(parents=True, exist_ok=True)
    taken = ResumeError(f"another worker is using the state in {settings.state}: give another --state")
    with exclusive(settings.state / LOCK_NAME, taken):
        run, progress, groups = "", WorkerProgress(""), dict[str, Tensors]()
        if (path := settings.state / STATE_NAME).exists():
            run, progress, groups = load_worker(path)
        trained, stands_by = 0, False
        while True:
            place = client.join(join_request(corpus, settings, run, progress.incarnation, stands_by), settings.wait)
            if place.protocol != PROTOCOL:
                said = protocol_refusal(place.protocol, client.address, "this worker", PROTOCOL, "rounds")
                raise ServiceError(said.message)
            worker = Worker(client, corpus, settings, place, site)
            worker.restore(run, progress, groups)
            groups = {}  # the worker has the tensors now; drop these, because memory does not hold both
            try:
                worker.work()
                return trained + worker.trained
            except LeaseLostError as error:
                log.warning("%s", error)
                stands_by = isinstance(error, TakenOverError)  # both would take the place from each other for ever
                run, progress, groups, trained = worker.run, worker.progress, worker.state(), trained + worker.trained
            except Interrupted:
                worker.save()
                worker.leave()
                raise
            finally:
                worker.closing.close()


class Worker:
    """One place of a run, while this process holds it."""

    def __init__(
        self,
        client: RoundsClient,
        corpus: Corpus,
        settings: WorkerSettings,
        place: rounds_pb2.JoinResponse,
        site: Site | None = None,
    ) -> None:
        """Raises OnesweepError if the coordinator's settings make no sense here."""
        self.client, self.settings, self.place, self.run, self.site = client, settings, place, place.run, site
        self.spec = RunSpec.joined(place, settings.state, corpus)
        if place.part >= len(self.spec.parts):
            raise ServiceError(f"{client.address} assigned part {place.part} of {len(self.spec.parts)}: it is faulty")
        self.run_settings, self.part = self.spec.config.rounds, self.spec.parts[place.part]
        self.progress, self.doing = WorkerProgress(self.part, incarnation=place.incarnation), rounds_pb2.DOING_WAITING
        self.rounds, self.losses = WorkerRounds(self.progress, self.run_settings), dict[str, float]()
        self.joined_s, self.busy_s = time.monotonic(), 0.0
        self.trained = 0
        self._saved_at = time.monotonic()
        with ExitStack() as stack:
            # before building the model, which can take longer than a lease on a busy machine
            self.heartbeat = Heartbeat(client, place.lease_seconds, self._report)
            stack.callback(self.heartbeat.stop)
            self.learner = self.spec.learner(place, corpus, settings)
            if site is not None:
                site.announce(place, self.learner, corpus.digest())
            self.cache = WeightCache(client, settings.name, place.lease, settings.state / INCOMING, self.spec.shapes)
            self.features = FeatureClient(client, settings, place, self.learner)
            stack.callback(self.features.end)
            self.closing = stack.pop_all()
        log.info("%s: %s, replica %d of run %s", settings.name, self.part, place.replica, self.run[:12])

    # State

    def restore(self, run: str, progress: WorkerProgress, groups: dict[str, Tensors]) -> None:
        """Resume an earlier state, if it belongs to this part. Raises ResumeError."""
        if run != self.run or progress.part != self.part:
            if progress.part:
                log.warning("the saved state is of %s, not %s: it is ignored", progress.part, self.part)
            return
        try:
            self.learner.load(groups[MODULE])
            self.learner.optimizers.restore(groups.get(OPTIMIZER, {}))
            saved = replace(progress, incarnation=self.place.incarnation)
            if (held := self.rounds.restore(saved, groups)) is not None:
                self.cache.held[self.part] = held
        except (KeyError, ValueError, RuntimeError) as error:
            raise ResumeError(f"the state in {self.settings.state} does not fit this run ({error})") from None
        self.progress = saved

    def state(self) -> dict[str, Tensors]:
        groups = {MODULE: self.learner.weights(), OPTIMIZER: self.learner.optimizers.tensors()}
        groups |= self.rounds.state(self.cache.held.get(self.part))
        return {name: tensors for name, tensors in groups.items() if tensors}

    def save(self) -> None:
        """Save the state. Raises CheckpointError, with the previous state intact."""
        save_worker(self.settings.state / STATE_NAME, self.run, self.progress, self.state())
        self._saved_at = time.monotonic()

    def leave(self) -> None:
        """Give the place back."""
        self.heartbeat.stop()
        self.client.leave(rounds_pb2.LeaveRequest(worker=self.settings.name, lease=self.place.lease))

    # Rounds

    def work(self) -> None:
        """Train round after round to the end of the run. Raises OnesweepError; LeaseLostError if the place is gone."""
        while self._next_round():
            if self._train():
                self.rounds.finish(self.learner.weights(), self.losses, f"{self.run} {self.settings.name}")
                self.trained += 1
                self.save()  # before the update is sent
        self.leave()

    def _next_round(self) -> bool:
        """Hand in a pending update, and begin the next round or resume the current one; False at the end."""
        self._submit()
        while True:
            self.doing, finished = rounds_pb2.DOING_WAITING, self.progress.finished
            request = rounds_pb2.NextRequest(
                worker=self.settings.name,
                lease=self.place.lease,
                after=finished if finished >= 0 else None,
                held=self.cache.summary(),
            )
            answer = self.client.next(request)
            if answer.WhichOneof("next") == "end":
                return False
            if answer.WhichOneof("next") != "pause" and self._follow(answer.order):
                return True

    def _follow(self, order: rounds_pb2.Order) -> bool:
        """Follow the coordinator's order; False if the worker has to ask for another."""
        self.doing = rounds_pb2.DOING_FETCHING
        try:
            self._take_copies(order)
            round_, steps = self.progress.round, self.progress.steps
            if not (self.rounds.is_current(order.round) and self.features.resumes(round_, steps)):
                self._start_round(order)
        except FileGoneError as error:  # probably there is a newer version
            log.info("%s", error)
            time.sleep(RETRY_S)
            return False
        return True

    def _start_round(self, order: rounds_pb2.Order) -> None:
        """Start the ordered round. Raises ServiceError for an order that makes no sense, FileGoneError."""
        wrong = order.round >= self.run_settings.rounds or order.steps != self.run_settings.steps_per_round
        if wrong or order.base.part != self.part:
            raise ServiceError(
                f"{self.client.address} ordered {order.steps} steps of {order.base.part[:40]!r}: it is faulty"
            )
        self.features.begin(order.round)
        weights = self.cache.fetch(order.base, self.run_settings.down_codec)
        self.learner.load(self.rounds.begin(order.round, order.base.version, weights))

    def _take_copies(self, order: rounds_pb2.Order) -> None:
        """Fetch newer copies of other parts. Raises ServiceError, FileGoneError."""
        if {offer.part for offer in order.copies} != set(self.learner.part.copies):
            raise ServiceError(f"{self.client.address} did not offer the copies that {self.part} needs: it is faulty")
        copies = {offer.part: self.cache.fetch(offer, self.run_settings.down_codec) for offer in order.copies}
        load_copies(self.learner.part, copies)

    def _train(self) -> bool:
        """Do the steps of a round; False if it is given up."""
        assert self.progress.round is not None
        first, steps = self.progress.round * self.run_settings.steps_per_round, self.run_settings.steps_per_round
        if self.site is not None:
            self.site.begin(self.learner, range(first + self.progress.steps, first + steps))
        while self.progress.steps < steps:
            if not self._may_continue():
                return False
            step = first + self.progress.steps
            try:
                if self.features.is_there(step):
                    self._step(step)
                else:
                    self.doing = rounds_pb2.DOING_FETCHING
            except (FileGoneError, CodecError) as error:
                log.warning("gave up round %d of %s: its features: %s", self.progress.round, self.part, error)
                self._give_up()
                return False
        self.features.settle()
        return True

    def _may_continue(self) -> bool:
        """True if the round is still worth training. Raises Interrupted, LeaseLostError."""
        round_, heartbeat = self.progress.round, self.heartbeat
        if self.client.asked_to_stop():
            raise Interrupted(f"{self.part}: stopped in round {round_}; run again to resume")
        if heartbeat.lost:
            raise heartbeat.lost
        if heartbeat.ended or not self.rounds.is_current(heartbeat.open_round):
            log.warning("gave up round %d of %s: it was closed without this worker", round_, self.part)
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self.rounds.give_up()
        self.features.end()

    def _step(self, number: int) -> None:
        self.doing, begin, machines = rounds_pb2.DOING_TRAINING, time.monotonic(), 1
        if self.site is None:
            record = self.learner.train(number, 1)
        else:
            record = self.learner.train(number, 1, partial(self.site.share, number))
            machines = self.site.size
        time.sleep(max(self.settings.pace_s - (time.monotonic() - begin), 0.0))
        self.losses = {name: nats for name, nats in record.items() if name.endswith("nats")}
        self.progress.steps += 1
        self.progress.sequences += machines * self.spec.config.sequences
        self.busy_s += time.monotonic() - begin
        if time.monotonic() - self._saved_at > self.settings.save_every_s:
            self.save()

    # Handing in

    def _submit(self) -> None:
        """Send a pending update until there is a verdict. Raises LeaseLostError, Interrupted, ServiceError."""
        pending, payload = self.progress.pending, self.rounds.payload
        if pending is None:
            return
        self.doing = rounds_pb2.DOING_SENDING
        submission = rounds_pb2.Submission(
            worker=self.settings.name,
            lease=self.place.lease,
            codec=self.run_settings.up_codec(pending["round"]),
            size=len(payload),
            sha256=hashlib.sha256(payload).digest(),
            **pending,
        )
        verdict = self.client.submit(submission, payload)
        self.progress.pending, self.rounds.payload = None, b""
        if verdict.outcome == rounds_pb2.OUTCOME_REFUSED:
            log.warning("round %d of %s was refused: %s", pending["round"], self.part, verdict.reason)
        else:
            log.info("submitted round %d of %s", pending["round"], self.part)

    def _report(self) -> rounds_pb2.BeatRequest:
        progress = self.progress
        return rounds_pb2.BeatRequest(
            worker=self.settings.name,
            lease=self.place.lease,
            doing=self.doing,
            round=max(progress.finished, 0) if progress.round is None else progress.round,
            steps=progress.steps,
            losses=self.losses,
            busy_seconds=self.busy_s,
            lived_seconds=time.monotonic() - self.joined_s,
        )


def join_request(
    corpus: Corpus, settings: WorkerSettings, run: str = "", incarnation: str = "", stands_by: bool = False
) -> rounds_pb2.JoinRequest:
    return rounds_pb2.JoinRequest(
        worker=settings.name,
        version=version("onesweep"),
        part=settings.part,
        data=corpus.digest(),
        run=run,
        device=settings.device,
        incarnation=incarnation,
        protocol=PROTOCOL,
        stands_by=stands_by,
    )
