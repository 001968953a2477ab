"""A coordinator: gives out places and orders, takes updates in, closes rounds, publishes. Knows nothing of gRPC calls.

Whatever is decided about updates is the ledger's; what is added here is who is there, what the time is, and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import asdict
from mmap import mmap
from pathlib import Path
from typing import ParamSpec, TypeVar

from stages.aside import in_thread, to_its_end
from stages.errors import CheckpointError, ConfigError
from stages.refusal import exhausted, invalid
from trainer.data import Corpus
from trainer.rounds.coordinator_settings import CoordinatorSettings
from trainer.rounds.feeder import Feeder
from trainer.rounds.ledger import Ledger
from trainer.rounds.members import Member, Members
from trainer.rounds.offers import Offers
from trainer.rounds.plan import RunPlan
from trainer.rounds.publishing import Publisher
from trainer.rounds.reception import Reception, check_beat
from trainer.v1 import rounds_pb2
from trainer.v1.rounds_pb2 import Order

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAIT_S = 60.0
TICK_S = 0.05
STORE_RETRY_S = 2.0
"""Between two tries to write what the disk did not take."""
EARLY_RETRY_MS = 200
MEMBERS = "members.json"


class Coordinator:
    """One run. Everything that must last is on the disk before anybody is told of it."""

    def __init__(
        self,
        plan: RunPlan,
        corpus: Corpus,
        ledger: Ledger,
        publisher: Publisher,
        directory: Path,
        settings: CoordinatorSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:param directory: for places and what comes in; :param clock: seconds, only forward.

        Raises ConfigError where workers may bring text that the coordinator does not have, and is to read for them.
        """
        if settings.own_data and plan.config.rounds.context_by == "features":
            raise ConfigError("the features that workers get are of the coordinator's text: leave --own-data out")
        self.needs = {part: plan.frame.task(i, corpus, plan.config.seed).needs for i, part in enumerate(plan.parts)}
        self.plan, self.settings, self.clock, self.publisher = plan, settings, clock, publisher
        self.begun_s = clock()
        self.ledger, self.ledger_lock = ledger, asyncio.Lock()
        self.offers = Offers(ledger, plan.config.rounds)
        self.feeder = Feeder(plan, corpus, ledger, self.ledger_lock, directory, self._tell)
        replicas = plan.config.rounds.replicas
        self.members = Members(directory / MEMBERS, len(plan.parts), replicas, settings.lease_s, clock())
        for record in ledger.store.records():
            if "worker" in record:
                part = plan.parts.index(plan.cutting.part_of[record["part"]])
                self.members.remember(record["worker"], part, record["part"], record["round"])
        self.reception = Reception(plan, ledger, directory)
        self.problem = ""
        self.stopping = False
        self.received_bytes = self.sent_bytes = 0
        self._expected: dict[str, int] = {}
        self._ordered = set[str]()
        self._asked: dict[str, list[int]] = {}
        """What those have done of a fragment who wait for their next round."""
        self._publishing: asyncio.Task[None] | None = None
        self._times_published = min(map(ledger.round, ledger.parts())) // settings.publish_every
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether every part has made its last round."""
        return all(self.ledger.round(fragment) >= self.plan.rounds for fragment in self.ledger.parts())

    def fragments(self, member: Member) -> tuple[str, ...]:
        """Of the part that a member trains."""
        return self.plan.cutting.parts[self.plan.parts[member.place.part]]

    def fragment(self, member: Member, number: int) -> str:
        """One of them. Raises Refusal."""
        fragments = self.fragments(member)
        if number >= len(fragments):
            raise invalid(f"there is no fragment {number}: parts of this run have {len(fragments)}")
        return fragments[number]

    # What workers ask for

    async def join(self, request: rounds_pb2.JoinRequest) -> rounds_pb2.JoinResponse:
        """Raises Refusal."""
        self.plan.check_join(request, self.settings.own_data)
        wanted = request.part if request.HasField("part") else None
        async with self._members_kept():
            member = self.members.join(request.worker, wanted, self.clock(), request.device[:64])
        place, part = member.place, self.plan.parts[member.place.part]
        log.info("%s joins: %s, replica %d", member.worker, part, place.replica)
        self._tell()
        return rounds_pb2.JoinResponse(
            run=self.plan.run,
            lease=member.lease,
            lease_seconds=self.settings.lease_s,
            part=place.part,
            replica=place.replica,
            config=json.dumps(asdict(self.plan.config)),
            manifest=self.plan.manifest.to_json(),
            codec=self.plan.config.rounds.codec,
        )

    async def next(
        self, request: rounds_pb2.NextRequest, waiting: Callable[[], Awaitable[None]]
    ) -> rounds_pb2.NextResponse:
        """What a worker does next; waits for it. Raises Refusal.

        :param waiting: called once nothing that comes later can change what the answer will be.
        """
        if not math.isfinite(request.wait_seconds):
            raise invalid("wait_seconds must be a finite number")
        member = self.called(request.worker, request.lease)
        fragment = self.fragment(member, request.fragment)
        done = max(member.done(fragment), request.after if request.HasField("after") else -1)
        if self._is_at_rest(member):  # else its update may still be on its way
            member.passed[fragment] = done
            self._tell()
        deadline = self.clock() + min(request.wait_seconds, MAX_WAIT_S)
        asked = self._asked.setdefault(fragment, [])
        with contextlib.ExitStack() as stack:
            if not self._is_answered(fragment, done):
                asked.append(done)
                stack.callback(asked.remove, done)
                await waiting()
            while True:
                changed, wanted = self._changed, self._next_round(fragment, done)
                if wanted is None:
                    return rounds_pb2.NextResponse(end=rounds_pb2.End(rounds=self.plan.rounds))
                if wanted > self._furthest(fragment) and self._is_given_up(fragment) and self._is_at_rest(member):
                    wanted = self.ledger.round(fragment)
                    member.passed[fragment] = wanted - 1
                if wanted <= self._furthest(fragment) and self.feeder.is_ready(member.place, wanted):
                    if (order := await self._order(member, fragment, wanted, request)) is None:
                        continue
                    member.begins(wanted)
                    return rounds_pb2.NextResponse(order=order)
                left = deadline - self.clock()
                if left <= 0 or self.stopping:
                    return rounds_pb2.NextResponse(pause=rounds_pb2.Pause(open_round=self.ledger.round(fragment)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
                self.called(request.worker, request.lease)

    def called(self, worker: str, lease: str) -> Member:
        """Who calls; its lease begins anew. Raises Refusal."""
        return self.members.called(worker, lease, self.clock())

    async def read(self, request: rounds_pb2.FetchRequest) -> bytes | mmap:
        """A file that an order named. Raises Refusal."""
        self.called(request.worker, request.lease)
        return self.feeder.read(request.name) or self.offers.read(request.name)

    async def beat(self, request: rounds_pb2.BeatRequest) -> rounds_pb2.BeatResponse:
        """Raises Refusal."""
        member = self.called(request.worker, request.lease)
        check_beat(request)
        request.DiscardUnknownFields()
        member.beat = rounds_pb2.BeatRequest()
        member.beat.CopyFrom(request)  # a message keeps the memory of all that came with it
        open_rounds = map(self.ledger.round, self.fragments(member))
        return rounds_pb2.BeatResponse(open_rounds=open_rounds, ended=self.ended)

    async def leave(self, request: rounds_pb2.LeaveRequest) -> rounds_pb2.LeaveResponse:
        """Raises Refusal."""
        member = self.called(request.worker, request.lease)
        async with self._members_kept():
            self.members.leave(member)
        log.info("%s leaves %s", member.worker, self.plan.parts[member.place.part])
        return rounds_pb2.LeaveResponse()

    async def judge(self, submission: rounds_pb2.Submission, payload: bytes) -> rounds_pb2.Verdict:
        """What becomes of an update that has come whole. Raises Refusal where it cannot be stored now."""
        async with self.ledger_lock:  # until it is known what the place has handed in, nobody else joins there
            member = self.called(submission.worker, submission.lease)
            fragment = self.fragment(member, submission.fragment)
            if submission.round > self._furthest(fragment):
                raise exhausted(f"round {submission.round} of {fragment} is not open yet", EARLY_RETRY_MS)
            verdict = self.reception.known(member, submission)
            if verdict is None:
                with _stored():
                    verdict = await in_thread(self.reception.judge, fragment, submission, payload, self.clock())
            member.was_told(fragment, submission.round, verdict)
        if verdict.outcome == rounds_pb2.OUTCOME_REFUSED:
            log.warning("update %s of %s refused: %s", submission.id, fragment, verdict.reason)
        self._tell()
        return verdict

    # What goes on by itself

    async def run(self) -> None:
        """Close rounds when they are due, and publish, until the run has ended. Raises CheckpointError."""
        try:
            while not self.ended:
                for fragment in self.ledger.parts():
                    if self.ledger.round(fragment) < self.plan.rounds:
                        await self._look_at(fragment)
                self._publish_if_due()
                await asyncio.sleep(TICK_S)
        finally:
            await self.feeder.close()
            if self._publishing is not None:
                await to_its_end(self._publishing)
        await self._publish(last=True)
        self._tell()

    async def changes(self, interval_s: float) -> AsyncGenerator[None]:
        """Now, and whenever something may have changed: at most once an interval; leases run out unsaid."""
        while True:
            yield
            changed = self._changed
            await asyncio.sleep(interval_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), max(interval_s, 1.0))

    def stop(self) -> None:
        """Let those who wait for something go."""
        self.stopping = True
        self._tell()

    async def _look_at(self, fragment: str) -> None:
        if any(self._is_answered(fragment, done) for done in self._asked.get(fragment, ())):
            return  # who waited for a version begins with it, before there is another
        await self._expect(fragment)
        async with self.ledger_lock:
            due = self.ledger.due(fragment, self.clock())
        if not due:
            return
        try:
            merged = await self._alone(self.ledger.close, fragment, self.clock())
        except CheckpointError as error:
            if self.problem != str(error):
                log.error("%s: the round cannot be closed: %s", fragment, error)
            self.problem = str(error)
            await asyncio.sleep(STORE_RETRY_S)
            return
        self.problem = ""
        log.info("%s: version %d from %d updates", fragment, merged.version, len(merged.updates))
        self._tell()

    def _publish_if_due(self) -> None:
        """Beside the rounds, one at a time."""
        if self._publishing is not None and not self._publishing.done():
            return
        done = min(map(self.ledger.round, self.ledger.parts())) // self.settings.publish_every
        if done > self._times_published:
            self._times_published = done
            self._publishing = asyncio.create_task(self._publish())

    async def _publish(self, last: bool = False) -> None:
        """Put the newest weights into the checkpoint; what is not fit for it stays as it was."""
        cutting, ledger = self.plan.cutting, self.ledger
        versions = {
            part: (min(map(ledger.round, fragments)), cutting.whole(part, ledger.weights))
            for part, fragments in cutting.parts.items()
        }
        try:
            await in_thread(self.publisher.publish, versions, last)
        except CheckpointError as error:
            self.problem = str(error)
            log.error("not published: %s", error)
            if last:
                raise

    async def _expect(self, fragment: str) -> None:
        """How many will hand in: places that nobody had yet, those who are here, and those who did already.

        Not those who are here and whose update was refused: what they make of the round again would be the same.
        """
        part, now, round_ = self.plan.cutting.part_of[fragment], self.clock(), self.ledger.round(fragment)
        members = [m for m in self.members if self.plan.parts[m.place.part] == part]
        away = [m for m in members if not self.members.is_here(m, now) and m.done(fragment) < round_]
        gone = len(away) + sum(self.members.is_here(m, now) and m.has_passed(fragment, round_) for m in members)
        expected = max(self.members.replicas - gone, 1)
        if self._expected.get(fragment) != expected:
            self._expected[fragment] = expected
            await self._alone(self.ledger.expect, fragment, expected)

    def _is_at_rest(self, member: Member) -> bool:
        """Whether who asks for a round has nothing on its way, and trains nothing meanwhile."""
        return self.plan.config.rounds.overlap == "none" and len(self.fragments(member)) == 1

    def _is_given_up(self, fragment: str) -> bool:
        """Whether nothing came for the open round, and nothing will: all that was made for it was refused."""
        part, now, round_ = self.plan.cutting.part_of[fragment], self.clock(), self.ledger.round(fragment)
        members = [m for m in self.members if self.plan.parts[m.place.part] == part]
        here = [m for m in members if self.members.is_here(m, now)]
        return self.ledger.due_at(fragment) is None and all(m.has_passed(fragment, round_) for m in here)

    async def _order(self, member: Member, fragment: str, wanted: int, request: rounds_pb2.NextRequest) -> Order | None:
        """None where the round was closed meanwhile: then it is not this one that begins."""
        order = Order(round=wanted, features=self.feeder.file(member.place, wanted))
        return await self._alone(self._filled, order, fragment, {h.part: h for h in request.held})

    def _filled(self, order: Order, fragment: str, held: dict[str, rounds_pb2.Held]) -> Order | None:
        if self.ledger.round(fragment) > order.round:
            return None
        if fragment not in self._ordered:  # until now nobody was there
            self._ordered.add(fragment)
            self.ledger.begin(fragment, self.clock())
        due = self.ledger.due_at(fragment)
        order.steps = self.plan.config.rounds.steps_per_round if order.round < self.plan.rounds else 0
        order.base.CopyFrom(self.offers.weights(fragment, held.get(fragment)))
        if self._is_last(fragment):
            others = self.needs[self.plan.cutting.part_of[fragment]]
            pieces = [piece for other in others for piece in self.plan.cutting.parts[other]]
            order.copies.extend(self.offers.copy(piece, held.get(piece)) for piece in pieces)
        if due is not None:
            order.seconds_left = max(due - self.clock(), 0.0)
        return order

    def _next_round(self, fragment: str, done: int) -> int | None:
        """The round after those that are done; None where there is no more.

        All but the last fragment have one more, in which nothing is learned: while the others are trained on, theirs
        must be the weights that the last round made.
        """
        wanted = max(self.ledger.round(fragment), done + 1)
        last = self.plan.rounds - self._is_last(fragment)
        return wanted if wanted <= last and not self.ended else None

    def _is_answered(self, fragment: str, done: int) -> bool:
        """Whether who has done this round need not wait."""
        wanted = self._next_round(fragment, done)
        return wanted is None or wanted <= self._furthest(fragment)

    def _is_last(self, fragment: str) -> bool:
        """Whether a round of its part ends with it."""
        return self.plan.cutting.parts[self.plan.cutting.part_of[fragment]][-1] == fragment

    def _furthest(self, fragment: str) -> int:
        """The last round that may be begun: with some overlaps, one that is not open yet."""
        return self.ledger.round(fragment) + self.plan.config.rounds.ahead

    async def _alone(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread, and nothing else touches the ledger meanwhile."""
        async with self.ledger_lock:
            return await in_thread(job, *args, **kwargs)

    @contextlib.asynccontextmanager
    async def _members_kept(self) -> AsyncGenerator[None]:
        """What becomes of places inside is on the disk after it, and no update is judged meanwhile. Raises Refusal."""
        async with self.ledger_lock:
            yield
            with _stored():
                await in_thread(self.members.save, self.members.records())

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@contextlib.contextmanager
def _stored() -> Iterator[None]:
    """What the disk did not take is worth another try. Raises Refusal."""
    try:
        yield
    except CheckpointError as error:
        raise exhausted(str(error), int(STORE_RETRY_S * 1000)) from None
