"""The gRPC face of a coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio

from stages.aside import in_thread
from stages.errors import CheckpointError, RequestError
from stages.refusal import Refusal, exhausted, invalid
from stages.tokens import STATUS, WORK
from trainer.rounds.access import Access
from trainer.rounds.coordinator import Coordinator
from trainer.rounds.members import Place
from trainer.rounds.status import status_of
from trainer.rounds.streams import Streams
from trainer.rounds.transfer import DamagedError, Intake, piece_at
from trainer.v1 import rounds_pb2, rounds_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_WATCHERS = 64
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 3600.0
STORE_RETRY_MS = 2000


class RoundsService(rounds_pb2_grpc.RoundsServiceServicer):
    """Turns messages into calls of a Coordinator, and Refusals into statuses."""

    def __init__(self, coordinator: Coordinator, access: Access) -> None:
        self.coordinator, self.access = coordinator, access
        self.watchers = 0
        self._sending, self._fetching = Streams(), Streams()
        """By place; by place and file."""
        self._judging = set[Place]()
        """Places with a payload in memory."""

    async def Join(self, request: rounds_pb2.JoinRequest, context: Context) -> rounds_pb2.JoinResponse:
        try:
            self.access.check_worker(context, WORK, request.worker)
            return await self.coordinator.join(request)
        except Refusal as refusal:
            await refusal.abort(context)

    async def Next(self, request: rounds_pb2.NextRequest, context: Context) -> rounds_pb2.NextResponse:
        try:
            self.access.check_worker(context, WORK, request.worker)
            return await self.coordinator.next(request, partial(context.send_initial_metadata, ()))
        except Refusal as refusal:
            await refusal.abort(context)

    async def Fetch(self, request: rounds_pb2.FetchRequest, context: Context) -> AsyncIterator[rounds_pb2.Piece]:
        try:
            self.access.check_worker(context, WORK, request.worker)
            member, offset = self.coordinator.called(request.worker, request.lease), request.offset
            with self._fetching.begin((member.place, request.name)) as check:
                # looked up for each piece, and not kept: who reads slowly keeps no file that is not offered any more
                while (piece := piece_at(await self.coordinator.read(request), offset)) is not None:
                    check()
                    offset += len(piece.data)
                    self.coordinator.sent_bytes += len(piece.data)
                    yield piece
        except RequestError as error:
            await invalid(str(error)).abort(context)
        except Refusal as refusal:
            await refusal.abort(context)

    async def Submit(
        self, requests: AsyncIterator[rounds_pb2.SubmitRequest], context: Context
    ) -> AsyncIterator[rounds_pb2.SubmitResponse]:
        try:
            submission = await self._submission(requests)
            self.access.check_worker(context, WORK, submission.worker)
            member = self.coordinator.called(submission.worker, submission.lease)
            self.coordinator.reception.check(member, submission)
            if (verdict := self.coordinator.reception.known(member, submission)) is None:
                with self._sending.begin(member.place) as check:
                    intake = await in_thread(self.coordinator.reception.begin, member, submission)
                    yield rounds_pb2.SubmitResponse(offset=intake.offset)
                    await self._receive(requests, intake, submission, check)
                    verdict = await self._judge(intake, member.place, submission, check)
            yield rounds_pb2.SubmitResponse(verdict=verdict)
        except DamagedError as error:
            await Refusal(grpc.StatusCode.DATA_LOSS, str(error)).abort(context)
        except RequestError as error:
            await invalid(str(error)).abort(context)
        except CheckpointError as error:
            await exhausted(str(error), STORE_RETRY_MS).abort(context)
        except Refusal as refusal:
            await refusal.abort(context)

    async def Beat(self, request: rounds_pb2.BeatRequest, context: Context) -> rounds_pb2.BeatResponse:
        try:
            self.access.check_worker(context, WORK, request.worker)
            return await self.coordinator.beat(request)
        except Refusal as refusal:
            await refusal.abort(context)

    async def Leave(self, request: rounds_pb2.LeaveRequest, context: Context) -> rounds_pb2.LeaveResponse:
        try:
            self.access.check_worker(context, WORK, request.worker)
            return await self.coordinator.leave(request)
        except Refusal as refusal:
            await refusal.abort(context)

    async def Watch(self, request: rounds_pb2.WatchRequest, context: Context) -> AsyncIterator[rounds_pb2.WatchUpdate]:
        interval = request.interval_seconds if request.HasField("interval_seconds") else DEFAULT_INTERVAL_S
        try:
            self.access.check_scope(context, STATUS)
            if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
                raise invalid(f"interval_seconds must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f}, not {interval}")
            if self.watchers >= MAX_WATCHERS:
                raise exhausted(f"{MAX_WATCHERS} watchers already; try again later", STORE_RETRY_MS)
        except Refusal as refusal:
            await refusal.abort(context)
        self.watchers += 1
        try:
            async with aclosing(self.coordinator.changes(interval)) as changes:
                async for _ in changes:
                    async with self.coordinator.ledger_lock:
                        status = status_of(self.coordinator)
                    yield status
                    if status.state != rounds_pb2.RUN_STATE_RUNNING:
                        return
        finally:
            self.watchers -= 1

    async def _submission(self, requests: AsyncIterator[rounds_pb2.SubmitRequest]) -> rounds_pb2.Submission:
        async for request in requests:
            if request.WhichOneof("step") == "submission":
                return request.submission
            break
        raise invalid("a submission begins with its header")

    async def _receive(
        self,
        requests: AsyncIterator[rounds_pb2.SubmitRequest],
        intake: Intake,
        submission: rounds_pb2.Submission,
        check: Callable[[], None],
    ) -> None:
        """Until the last piece of the payload has come. Raises Refusal, RequestError, CheckpointError."""
        while not intake.whole:
            request = await anext(aiter(requests), None)
            if request is None:
                raise invalid(f"the pieces ended after {intake.offset} of {intake.parcel.size} bytes")
            if request.WhichOneof("step") != "piece":
                raise invalid("a submission has one header, and then pieces only")
            check()
            self.coordinator.called(submission.worker, submission.lease)
            await in_thread(intake.write, request.piece)
            self.coordinator.received_bytes += len(request.piece.data)

    async def _judge(
        self, intake: Intake, place: Place, submission: rounds_pb2.Submission, check: Callable[[], None]
    ) -> rounds_pb2.Verdict:
        """One at a time for each place: however many calls it begins, one payload is in memory."""
        check()
        if place in self._judging:
            raise exhausted("an update of this place is being judged; try again", STORE_RETRY_MS)
        self._judging.add(place)
        try:
            verdict = await self.coordinator.judge(submission, await in_thread(intake.read))
            intake.drop()
        finally:
            self._judging.remove(place)
        return verdict
