"""gRPC and the network in memory: what servers and clients rely on is the same on both."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from loadtest.simulation.calls import MemoryChannel
from loadtest.simulation.loop import Process, virtual_time
from loadtest.simulation.network import MemoryNetwork
from loadtest.simulation.served import MemoryServer
from serving.cli.ports import free_port_block
from serving.v1 import router_pb2, router_pb2_grpc
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire import channel
from stages.wire.channel import bind, new_server, open_channel
from stages.wire.status import RETRY_AFTER, DecodeErrors, StatusError, exhausted, trailing_metadata
from tests.conftest import eventually, refused

MESSAGE_BYTES, MANY = 1 << 20, 200
LARGE = bytes(MESSAGE_BYTES // 2)
SHORT_S = 0.2
Stub = Any
Story = Callable[["Bench"], Awaitable[None]]


class Service(stage_pb2_grpc.StageServiceServicer):
    """Answers in the ways that matter, and notes what happened to its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def Warm(self, request: stage_pb2.WarmRequest, context: Any) -> stage_pb2.WarmResponse:
        if request.padding == b"refuse":
            raise exhausted("come back", 700)
        if request.padding == b"break":
            raise ValueError("a mistake")
        if request.padding == b"wait":
            await self._wait(context.time_remaining())
        return stage_pb2.WarmResponse(padding=bytes(request.reply_bytes))

    async def Push(self, batches: AsyncIterator[stage_pb2.HopBatch], context: Any) -> AsyncIterator[stage_pb2.Ack]:
        async for batch in batches:
            self.seen.append(batch.number)
            yield stage_pb2.Ack(number=batch.number)
        yield stage_pb2.Ack(number=10_000)  # its client has half-closed, and still listens

    async def Subscribe(self, request: stage_pb2.SubscribeRequest, context: Any) -> AsyncIterator[stage_pb2.Events]:
        await context.send_initial_metadata((("who", "me"),))
        if request.router == "wait":
            yield stage_pb2.Events()
            await self._wait(None)
        for number in range(MANY):
            self.seen.append(number)
            yield stage_pb2.Events(events=[stage_pb2.Event(number=number, text=LARGE)])

    async def _wait(self, left_s: float | None) -> None:
        self.seen.append(left_s)
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            if not self.ended.done():
                self.ended.set_result("cancelled")
            raise


@dataclass
class Bench:
    """A server and a client of one transport."""

    service: Service
    stub: Stub
    channel: grpc.aio.Channel
    kill: Callable[[], Awaitable[None]]
    elsewhere: Stub  # an address where no server listens


def over_grpc(story: Story) -> None:
    async def run() -> None:
        server, service = new_server(MESSAGE_BYTES), Service()
        stage_pb2_grpc.add_StageServiceServicer_to_server(service, server)
        port = bind(server, "127.0.0.1:0")
        await server.start()
        opened = open_channel(f"127.0.0.1:{port}", MESSAGE_BYTES)
        nowhere = open_channel(f"127.0.0.1:{free_port_block(1)}")
        stubs = [stage_pb2_grpc.StageServiceStub(each) for each in (opened, nowhere)]
        try:
            await story(Bench(service, stubs[0], opened, partial(server.stop, None), stubs[1]))
        finally:
            await asyncio.gather(opened.close(), nowhere.close(), server.stop(None))

    asyncio.run(run())


def in_memory(story: Story) -> None:
    with virtual_time() as loop, pytest.MonkeyPatch.context() as patch:
        network = MemoryNetwork(loop)
        server_process, client_process = Process(loop, "there"), Process(loop, "here")
        patch.setattr(channel, "connect", partial(MemoryChannel, network))

        async def serve() -> Service:
            server: Any = MemoryServer(network, [DecodeErrors()], MESSAGE_BYTES)
            stage_pb2_grpc.add_StageServiceServicer_to_server(service := Service(), server)
            server.listen("127.0.0.1:1")
            return service

        async def kill() -> None:
            network.kill(server_process)

        async def run() -> None:
            service = await server_process.start(serve())
            opened, nowhere = open_channel("127.0.0.1:1", MESSAGE_BYTES), open_channel("127.0.0.1:2")
            stubs = [stage_pb2_grpc.StageServiceStub(each) for each in (opened, nowhere)]
            await story(Bench(service, stubs[0], opened, kill, stubs[1]))

        loop.run_until_complete(client_process.start(run()))
        assert loop.problems == []


def on_both(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test of gRPC and of memory from a coroutine, whose first parameter is a bench of that transport."""

    def test(over: Callable[[Story], None], **given: Any) -> None:
        over(partial(story, **given))

    first, *own = inspect.signature(story).parameters.values()
    test.__signature__ = inspect.Signature([first.replace(name="over"), *own])  # by which pytest gives them
    return pytest.mark.parametrize("over", [over_grpc, in_memory], ids=["gRPC", "memory"])(test)


async def batches(numbers: range) -> AsyncIterator[stage_pb2.HopBatch]:
    for number in numbers:
        yield stage_pb2.HopBatch(number=number)


async def standing_still(seen: list[Any]) -> None:
    """Wait until nothing more is seen."""
    still, before = 0, -1
    while still < 20:
        still, before = (still + 1 if len(seen) == before else 0), len(seen)
        await asyncio.sleep(0.01)


@on_both
async def test_messages_arrive_in_order_and_after_the_client_half_closed(bench: Bench) -> None:
    acks = [ack.number async for ack in bench.stub.Push(batches(range(50)))]
    assert acks == [*range(50), 10_000]
    assert bench.service.seen == [*range(50)]


@on_both
async def test_a_writer_waits_for_its_reader(bench: Bench) -> None:
    call = bench.stub.Subscribe(stage_pb2.SubscribeRequest(router="read"))
    assert dict(await call.initial_metadata()) == {"who": "me"}
    async with aclosing(aiter(call)) as events:
        await anext(events)
        await standing_still(bench.service.seen)
        assert len(bench.service.seen) < MANY / 2
        numbers = [0, *[each.events[0].number async for each in events]]
    assert numbers == [*range(MANY)]


@pytest.mark.parametrize("way", ["call", "task", "iterator"])
@on_both
async def test_a_handler_ends_with_its_client(bench: Bench, way: str) -> None:
    if way == "iterator":
        events = aiter(bench.stub.Subscribe(stage_pb2.SubscribeRequest(router="wait")))
        await anext(events)
        await events.aclose()
    else:
        call = bench.stub.Warm(stage_pb2.WarmRequest(padding=b"wait"))
        task = asyncio.ensure_future(_result(call))
        await eventually(lambda: bench.service.seen)
        (call if way == "call" else task).cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await bench.service.ended == "cancelled"


async def _result(call: Any) -> Any:
    return await call


@on_both
async def test_a_deadline_ends_both_sides(bench: Bench) -> None:
    while not bench.service.seen:  # a busy machine may begin too late
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            await bench.stub.Warm(stage_pb2.WarmRequest(padding=b"wait"), timeout=SHORT_S)
    assert await bench.service.ended == "cancelled"
    assert bench.service.seen[0] < 2 * SHORT_S


@pytest.mark.parametrize("stream", [True, False])
@on_both
async def test_a_dead_peer_ends_its_calls_and_refuses_the_next(bench: Bench, stream: bool) -> None:
    if stream:
        call = aiter(bench.stub.Subscribe(stage_pb2.SubscribeRequest(router="wait")))
        await anext(call)
        waiting = asyncio.ensure_future(anext(call))
    else:
        waiting = asyncio.ensure_future(_result(bench.stub.Warm(stage_pb2.WarmRequest(padding=b"wait"))))
    await eventually(lambda: bench.service.seen)
    await bench.kill()
    with refused(grpc.StatusCode.UNAVAILABLE):
        await waiting
    with refused(grpc.StatusCode.UNAVAILABLE):
        await bench.stub.Warm(stage_pb2.WarmRequest())


@on_both
async def test_a_call_that_waits_for_a_server_ends_at_its_deadline(bench: Bench) -> None:
    with refused(grpc.StatusCode.UNAVAILABLE, "failed to connect"):
        await bench.elsewhere.Warm(stage_pb2.WarmRequest())
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        await bench.elsewhere.Warm(stage_pb2.WarmRequest(), timeout=SHORT_S, wait_for_ready=True)


@on_both
async def test_a_status_of_the_server_arrives_with_its_message(bench: Bench) -> None:
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "come back") as caught:
        await bench.stub.Warm(stage_pb2.WarmRequest(padding=b"refuse"))
    assert trailing_metadata(caught.value)[RETRY_AFTER] == "700"
    with refused(grpc.StatusCode.UNKNOWN, "Unexpected .*a mistake"):
        await bench.stub.Warm(stage_pb2.WarmRequest(padding=b"break"))
    with refused(grpc.StatusCode.UNIMPLEMENTED):
        await router_pb2_grpc.RouterServiceStub(bench.channel).Status(router_pb2.StatusRequest())


@pytest.mark.parametrize("too_large", ["request", "answer"])
@on_both
async def test_messages_beyond_the_limit_are_refused(bench: Bench, too_large: str) -> None:
    asked = {"padding": bytes(MESSAGE_BYTES)} if too_large == "request" else {"reply_bytes": MESSAGE_BYTES}
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
        await bench.stub.Warm(stage_pb2.WarmRequest(**asked))
    answer = await bench.stub.Warm(stage_pb2.WarmRequest(reply_bytes=len(LARGE)))
    assert len(answer.padding) == len(LARGE), "the connection is as it was"


@on_both
async def test_a_closed_channel_refuses_calls(bench: Bench) -> None:
    waiting = asyncio.ensure_future(_result(bench.stub.Warm(stage_pb2.WarmRequest(padding=b"wait"))))
    await eventually(lambda: bench.service.seen)
    await bench.channel.close()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError, StatusError)):
        await waiting
    with pytest.raises(grpc.aio.UsageError):
        await bench.stub.Warm(stage_pb2.WarmRequest())
