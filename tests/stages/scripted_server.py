"""A server that answers a relay by a script of the test, and a relay that keeps the outcome of its hops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import new_server
from stages.wire.hop_stream import Relay
from stages.wire.messages import PROTOCOL
from stages.wire.status import StatusError
from tests.conftest import PATIENCE_S, eventually, started

HOP_TIMEOUT_S = 0.3
PATIENT_S = 20.0

Answer = Callable[[Any, stage_pb2.HopBatch], Awaitable[stage_pb2.Ack]]


class Answering(stage_pb2_grpc.StageServiceServicer):
    """Answers batches by a script of the test, and keeps them."""

    server: grpc.aio.Server

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.batches: list[stage_pb2.HopBatch] = []
        self.streams = 0
        self.spares = False  # acks without a batch
        # Sizes of the keep-warm messages.
        self.warmed: list[int] = []

    async def Warm(self, request: stage_pb2.WarmRequest, context: Any) -> stage_pb2.WarmResponse:
        self.warmed.append(len(request.padding))
        return stage_pb2.WarmResponse()

    async def warmed_more(self, than: int) -> list[int]:
        """The sizes, once there are more of them."""
        await eventually(lambda: len(self.warmed) > than)
        return self.warmed

    async def Push(self, batches: AsyncIterator[stage_pb2.HopBatch], context: Any) -> AsyncIterator[stage_pb2.Ack]:
        self.streams += 1
        async for batch in batches:
            self.batches.append(batch)
            answer = await self.answer(context, batch)
            if not (self.spares and batch.quiet):
                yield answer

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Any) -> stage_pb2.DescribeResponse:
        return stage_pb2.DescribeResponse(name="tokyo", protocol=PROTOCOL)

    @property
    def sessions(self) -> list[list[str]]:
        """Names of the hops of each batch."""
        return [[hop.session for hop in batch.hops] for batch in self.batches]


class WatchedRelay(Relay):
    """A relay that keeps what became of each hop."""

    def __init__(self, address: str, message_bytes: int, hop_timeout_s: float) -> None:
        super().__init__(address, message_bytes, hop_timeout_s)
        self.outcomes: list[tuple[str, StatusError | None]] = []

    def post(self, *hops: stage_pb2.Hop) -> None:
        for made in hops:
            self.send(made, lambda refusal, session=made.session: self.outcomes.append((session, refusal)))

    async def all_of(self, count: int) -> dict[str, str]:
        """Codes by session, `ok` for accepted hops, once `count` hops have been settled; each once."""
        await eventually(lambda: len(self.outcomes) >= count)
        await asyncio.sleep(0.02)
        codes = {session: refusal.code.name if refusal else "ok" for session, refusal in self.outcomes}
        assert len(codes) == len(self.outcomes) == count, "a hop was settled twice"
        return codes


@asynccontextmanager
async def relay_to(
    answer: Answer | Answering, hop_timeout_s: float = PATIENT_S
) -> AsyncIterator[tuple[Answering, WatchedRelay]]:
    """A server that answers so, and a relay to it."""
    server, service = new_server(), answer if isinstance(answer, Answering) else Answering(answer)
    stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
    port, service.server = server.add_insecure_port("127.0.0.1:0"), server
    relay = WatchedRelay(f"127.0.0.1:{port}", 4 << 20, hop_timeout_s)
    async with started(server), asyncio.timeout(PATIENCE_S):
        yield service, relay
        await relay.close()


async def push(relay: Relay, made: stage_pb2.Hop) -> None:
    """Send it, and wait for its acknowledgement. Raises StatusError."""
    settled: asyncio.Future[StatusError | None] = asyncio.get_running_loop().create_future()
    relay.send(made, settled.set_result)
    if (refusal := await settled) is not None:
        raise refusal


def hop(session: str = "s", left_s: float = 60.0, payload: int = 0) -> stage_pb2.Hop:
    made = stage_pb2.Hop(session=session, left_s=left_s)
    if payload:
        made.sweep.estimate = bytes(payload)
    return made


def push_to(answer: Answer, describe: bool = False) -> StatusError:
    """The error of a push to a server that answers so."""

    async def refusal() -> StatusError:
        async with relay_to(answer, HOP_TIMEOUT_S if answer is hang else PATIENT_S) as (_, relay):
            if describe:
                await relay.describe(5.0)
            with pytest.raises(StatusError) as caught:
                await push(relay, hop())
            return caught.value

    return asyncio.run(refusal())


async def take(context: Any, batch: stage_pb2.HopBatch) -> stage_pb2.Ack:
    return stage_pb2.Ack(number=batch.number)


async def hang(context: Any, batch: stage_pb2.HopBatch) -> stage_pb2.Ack:
    await asyncio.Event().wait()
    return stage_pb2.Ack()


def rejecting(refusal: StatusError, indices: Sequence[int] = (0,)) -> Answer:
    """Takes a batch, but for the hops at these places."""

    async def answer(context: Any, batch: stage_pb2.HopBatch) -> stage_pb2.Ack:
        ack = stage_pb2.Ack(number=batch.number)
        for index in indices:
            ack.rejections.add(
                index=index, code=refusal.number, message=refusal.message, retry_after_ms=refusal.retry_after_ms or 0
            )
        return ack

    return answer


def aborting(refusal: StatusError) -> Answer:
    """Ends the call, or the whole stream."""

    async def answer(context: Any, batch: stage_pb2.HopBatch) -> stage_pb2.Ack:
        await refusal.abort(context)

    return answer


async def crash(context: Any, batch: stage_pb2.HopBatch) -> stage_pb2.Ack:
    raise RuntimeError("boom")
