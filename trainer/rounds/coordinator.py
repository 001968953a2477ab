"""A coordinator: assigns places and orders, receives updates, closes rounds and publishes. It does not use gRPC."""

# The ledger decides about updates; the coordinator adds the present workers, the time, and files.

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from mmap import mmap
from pathlib import Path

from stages.clock import monotonic
from stages.errors import CheckpointError, ConfigError
from stages.threads import in_thread, run_to_completion
from stages.wire.status import StatusError, failed_precondition, invalid
from trainer.blocks.data import Corpus
from trainer.rounds.file_server import FeatureRelay, UpdateIntake, WeightServer, check_beat
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Member, Members
from trainer.rounds.merging import MAX_STRIKES, HeldOut
from trainer.rounds.parts import FEATURES
from trainer.rounds.publishing import Publisher
from trainer.rounds.schedule import RoundSchedule, state_mismatch
from trainer.rounds.settings import PROTOCOL, CoordinatorSettings
from trainer.rounds.spec import RunSpec
from trainer.v1 import rounds_pb2
from trainer.v1.rounds_pb2 import Order

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
TICK_S = 0.05
STORE_RETRY_S = 2.0  # pause before retrying a failed write


class Coordinator:
    """One run. Everything that must last is on disk before any worker learns of it."""

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        ledger: Ledger,
        publisher: Publisher,
        directory: Path,
        settings: CoordinatorSettings,
    ) -> None:
        """:param directory: for incoming updates and features.

        Raises ConfigError if workers may bring different text from those that they pass features on to; DataError for
        too little text to score updates.
        """
        if settings.own_data and spec.config.rounds.by_features:
            raise ConfigError('features need one text for all workers: omit --own-data, or set context_by = "copies"')
        self.needs = {part: spec.task(i, corpus, spec.config.seed).copies.keys() for i, part in enumerate(spec.parts)}
        self.spec, self.settings, self.clock, self.publisher = spec, settings, monotonic, publisher
        self.begun_s = self.clock()
        self.ledger, self.ledger_lock = ledger, asyncio.Lock()
        self.weights = WeightServer(ledger)
        replicas = spec.config.rounds.replicas
        self.members = Members(ledger.store, len(spec.parts), replicas, settings.lease_s, self.clock())
        self.features = FeatureRelay(spec, ledger, self.members, directory)
        self.schedule = RoundSchedule(spec, ledger, self.members, self.features, self.clock)
        for record in ledger.store.records():
            if "worker" in record:
                self.members.remember(record["worker"], spec.parts.index(record["part"]), record["round"])
        # without keys the place holds the record, and no other worker can take an expelled place
        self.members.is_closed = lambda place: f"place-{place.replica}" in ledger.expelled([spec.parts[place.part]])
        self.intake = UpdateIntake(spec, ledger, directory)
        scored = spec.config.rounds.robust == "scored"
        self.loss = HeldOut(spec, corpus, ledger.weights, ledger.secret) if scored else None
        self.problem = self.unpublished = ""
        self.stopping = False
        self.received_bytes = self.sent_bytes = 0
        # The rounds that each part's waiting workers have done.
        self._waiting: dict[str, list[int]] = {part: [] for part in spec.parts}
        self._publishing: asyncio.Task[None] | None = None
        self._times_published = self.schedule.closed // settings.publish_every
        self._changed = asyncio.Event()

    # Calls of workers

    async def join(self, request: rounds_pb2.JoinRequest, key: str = "") -> rounds_pb2.JoinResponse:
        """Raises StatusError, CheckpointError. :param key: the key that the worker presented."""
        self.spec.check_join(request, self.settings.own_data)
        if request.incarnation not in ("", self.ledger.incarnation or request.incarnation):
            raise state_mismatch("your state is from before the directory of this run was lost or replaced")
        requested_part = request.part if request.HasField("part") else None
        async with self._saving_members():
            device, stands_by = request.device[:64], request.stands_by
            member = self.members.join(request.worker, requested_part, self.clock(), device, key, stands_by)
            # a key carries its record to any part; a place has only its own
            place, part = member.place, self.spec.parts[member.place.part]
            if member.voter in self.ledger.expelled(self.spec.parts if key else [part]):
                self.members.leave(member)
                raise _expelled(key or request.worker)
        log.info("%s joined: %s, replica %d", member.worker, part, place.replica)
        self._notify()
        return rounds_pb2.JoinResponse(
            run=self.spec.run,
            lease=member.lease,
            lease_seconds=self.settings.lease_s,
            part=place.part,
            replica=place.replica,
            config=json.dumps(asdict(self.spec.config)),
            manifest=self.spec.checkpoint.to_json(),
            incarnation=self.ledger.incarnation,
            protocol=PROTOCOL,
        )

    async def next(self, request: rounds_pb2.NextRequest) -> rounds_pb2.NextResponse:
        """A worker's next order; waits for it. Raises StatusError."""
        if not math.isfinite(request.wait_seconds):
            raise invalid("wait_seconds must be a finite number")
        member = self.called(request.worker, request.lease)
        part = self.spec.parts[member.place.part]
        done = self._last_done(member, part, request)
        deadline = self.clock() + min(request.wait_seconds, MAX_WAIT_S)
        with contextlib.ExitStack() as stack:
            if not self.schedule.is_answered(part, done):
                self._waiting[part].append(done)
                stack.callback(self._waiting[part].remove, done)
            while True:
                changed = self._changed
                if (answer := await self._answer(member, part, done, request, deadline)) is not None:
                    return answer
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), deadline - self.clock())
                self.called(request.worker, request.lease)

    def _last_done(self, member: Member, part: str, request: rounds_pb2.NextRequest) -> int:
        """The last round that a worker has done or will not do. Raises StatusError."""
        done = max(member.finished, request.after if request.HasField("after") else -1)
        held = max((h.version for h in request.held if h.part == part), default=0)
        self.schedule.check_known(part, done, held)
        if (target_round := self.schedule.next_round(part, done)) is not None and self.features.is_missed(
            member.place, target_round
        ):
            member.problem = f"no worker made the features for round {target_round}; it waits for the next one"
            done = target_round
        member.passed = done
        self._notify()
        return done

    async def _answer(
        self, member: Member, part: str, done: int, request: rounds_pb2.NextRequest, deadline: float
    ) -> rounds_pb2.NextResponse | None:
        """The answer for a worker that has done this round; None while it has to wait."""
        target_round = self.schedule.round_to_train(member, part, done)
        if target_round is None:
            return rounds_pb2.NextResponse(end=rounds_pb2.End())
        if self.schedule.may_begin(member, part, target_round):
            held = {h.part: h for h in request.held}
            async with self.ledger_lock:
                order = await in_thread(self._fill_order, Order(round=target_round), part, held)
            if order is None:  # the round was closed meanwhile, so it does not begin
                return None
            member.record_order(target_round)
            return rounds_pb2.NextResponse(order=order)
        if self.clock() >= deadline or self.stopping or self.features.is_missed(member.place, target_round):
            return rounds_pb2.NextResponse(pause=rounds_pb2.Pause())
        return None

    def called(self, worker: str, lease: str) -> Member:
        """The calling member, with its lease renewed. Raises StatusError."""
        member = self.members.called(worker, lease, self.clock())
        if self._is_expelled(member):
            raise _expelled(worker)
        return member

    async def read(self, request: rounds_pb2.FetchRequest, offset: int) -> bytes | mmap:
        """A file that an order named, or the features made so far, with some beyond `offset`. Raises StatusError."""
        member = self.called(request.worker, request.lease)
        if request.name.startswith(FEATURES):
            return await self.features.read(member, request.name, offset)
        return self.weights.read(request.name)

    async def beat(self, request: rounds_pb2.BeatRequest) -> rounds_pb2.BeatResponse:
        """Raises StatusError."""
        member = self.called(request.worker, request.lease)
        check_beat(request)
        request.DiscardUnknownFields()
        member.beat = rounds_pb2.BeatRequest()
        member.beat.CopyFrom(request)  # a reference would keep the memory of the whole message
        open_round = self.ledger.round(self.spec.parts[member.place.part])
        return rounds_pb2.BeatResponse(open_round=open_round, ended=self.schedule.ended)

    async def leave(self, request: rounds_pb2.LeaveRequest) -> rounds_pb2.LeaveResponse:
        """Raises StatusError."""
        member = self.called(request.worker, request.lease)
        async with self._saving_members():
            self.members.leave(member)
        log.info("%s left %s", member.worker, self.spec.parts[member.place.part])
        return rounds_pb2.LeaveResponse()

    async def judge(self, submission: rounds_pb2.Submission, read: Callable[[], bytes]) -> rounds_pb2.Verdict:
        """The verdict on a complete update. Raises StatusError, CheckpointError, and errors of `read`."""
        # under the lock: no other worker joins at this place before its update is known, and at most one payload is in
        # memory, whatever the number of calls
        async with self.ledger_lock:
            member = self.called(submission.worker, submission.lease)
            part = self.spec.parts[member.place.part]
            self.schedule.check_known(part, submission.round, submission.base_version)
            verdict = self.intake.early_verdict(member, submission)
            if verdict is None:
                payload, now_s = await in_thread(read), self.clock()
                verdict = await in_thread(self.intake.judge, part, submission, payload, now_s, member.voter)
            member.record_verdict(submission.round, verdict)
        if verdict.outcome == rounds_pb2.OUTCOME_REFUSED:
            log.warning("update %s of %s refused: %s", submission.id, part, verdict.reason)
        self._notify()
        return verdict

    # Closing rounds

    async def run(self) -> None:
        """Close due rounds and publish until the run has ended. Raises CheckpointError."""
        try:
            while not self.schedule.ended:
                await self.step()
                await asyncio.sleep(TICK_S)
        finally:
            if self._publishing is not None:
                await run_to_completion(self._publishing)
        await self._publish(last=True)
        self._notify()

    async def step(self) -> None:
        """Close each round that is due now, and start to publish if that is due."""
        for part in self.spec.parts:
            if self.ledger.round(part) < self.spec.rounds:
                await self._close_if_due(part)
        done = self.schedule.closed // self.settings.publish_every
        # in parallel with the rounds, one at a time
        if done > self._times_published and (self._publishing is None or self._publishing.done()):
            self._times_published = done
            self._publishing = asyncio.create_task(self._publish())

    async def changes(self, interval_s: float) -> AsyncGenerator[None]:
        """Yield now and whenever something may have changed, at most once an interval: leases expire silently."""
        while True:
            yield
            changed = self._changed
            await asyncio.sleep(interval_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), max(interval_s, 1.0))

    def stop(self) -> None:
        """Answer the waiting workers."""
        self.stopping = True
        self._notify()

    def report(self, error: CheckpointError) -> None:
        """Report a failed write until a round can be written."""
        if not self.problem:
            log.error("%s", error)
        self.problem = str(error)

    async def _close_if_due(self, part: str) -> None:
        if any(self.schedule.is_answered(part, done) for done in self._waiting[part]):
            return  # a worker that waited for this version begins with it before the next one exists
        self.ledger.expect(part, self.schedule.expected(part))
        async with self.ledger_lock:
            due = self.ledger.due(part, self.clock())
        if not due:
            return
        try:
            async with self.ledger_lock:
                merged = await in_thread(self.ledger.close, part, self.clock(), self.loss)
        except CheckpointError as error:
            self.report(error)
            await asyncio.sleep(STORE_RETRY_S)
            return
        self.problem = ""
        log.info("%s: version %d from %d updates", part, merged.version, len(merged.updates))
        for member in self.schedule.trainers(part):
            if (score := merged.scores.get(member.voter)) is not None and not score.kept:
                member.problem = f"left out of version {merged.version} of {part}: {score}"
                log.warning("%s: %s", member.worker, member.problem)
            if member.lease and self._is_expelled(member):
                log.warning("%s", _expelled(member.worker))
                self.members.leave(member)  # nothing waits for it; after a restart, `called` rejects it
        self._notify()

    async def _publish(self, last: bool = False) -> None:
        """Put the newest weights into the checkpoint; if they are not fit for it, it stays as it was."""
        versions = {part: (self.ledger.round(part), self.ledger.weights(part)) for part in self.spec.parts}
        try:
            await in_thread(self.publisher.publish, versions, last)
            self.unpublished = ""
        except CheckpointError as error:
            self.unpublished = str(error)
            log.error("not published: %s", error)
            if last:
                raise

    def _is_expelled(self, member: Member) -> bool:
        return member.voter in self.ledger.expelled([self.spec.parts[member.place.part]])

    def _fill_order(self, order: Order, part: str, held: dict[str, rounds_pb2.Held]) -> Order | None:
        if self.ledger.round(part) > order.round:
            return None
        self.ledger.begin(part, self.clock())
        order.steps = self.spec.config.rounds.steps_per_round
        order.base.CopyFrom(self.weights.weights(part, held.get(part)))
        order.copies.extend(self.weights.weights(copied, held.get(copied)) for copied in self.needs[part])
        return order

    @contextlib.asynccontextmanager
    async def _saving_members(self) -> AsyncGenerator[None]:
        """Save the changes of places made inside the block at its end, and judge no update meanwhile."""
        async with self.ledger_lock:
            yield
            await in_thread(self.ledger.store.save_members, self.members.records())

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _expelled(name: str) -> StatusError:
    return failed_precondition(
        f"{name} is expelled from this run: {MAX_STRIKES} times in a row, its update did not lower the loss on "
        "held-out text, while other updates did"
    )
