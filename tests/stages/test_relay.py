"""What a relay says of a host that does not answer, refuses, or is something else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from stages.refusal import Refusal, exhausted
from stages.relay import Relay
from stages.transport import new_server
from stages.v1 import stage_pb2, stage_pb2_grpc

HOP_TIMEOUT_S = 0.3


class Answering(stage_pb2_grpc.StageServiceServicer):
    """Answers pushes as it is told."""

    def __init__(self, answer: Callable[[Any], Awaitable[None]]) -> None:
        self.answer = answer

    async def Push(self, request: stage_pb2.PushRequest, context: Any) -> stage_pb2.PushResponse:
        await self.answer(context)
        return stage_pb2.PushResponse()

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Any) -> stage_pb2.DescribeResponse:
        return stage_pb2.DescribeResponse(name="tokyo")


def push_to(answer: Callable[[Any], Awaitable[None]] | None, left_s: float = 60.0, describe: bool = False) -> Refusal:
    """Push to a server that answers so (None: a server without the service)."""

    async def run() -> None:
        server = new_server()
        if answer is not None:
            stage_pb2_grpc.add_StageServiceServicer_to_server(Answering(answer), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        relay = Relay(f"127.0.0.1:{port}", 4 << 20, HOP_TIMEOUT_S)
        try:
            if describe:
                await relay.describe(1.0)
            await relay.push(stage_pb2.PushRequest(deadline_unix_ms=int((time.time() + left_s) * 1000)))
        finally:
            await relay.close()
            await server.stop(0)

    with pytest.raises(Refusal) as caught:
        asyncio.run(run())
    return caught.value


async def hang(context: Any) -> None:
    await asyncio.sleep(30)


async def refuse(context: Any) -> None:
    await exhausted("tokyo has 64 hops waiting", retry_after_ms=700).abort(context)


async def load(context: Any) -> None:
    await Refusal(grpc.StatusCode.UNAVAILABLE, "tokyo is still loading its weights").abort(context)


async def crash(context: Any) -> None:
    raise RuntimeError("boom")


def test_a_host_that_hangs_is_named_with_the_time_waited() -> None:
    refusal = push_to(hang)
    assert refusal.code is grpc.StatusCode.UNAVAILABLE
    assert refusal.message.startswith("the host at 127.0.0.1:")
    assert "did not answer within 0.3 s; see that it runs" in refusal.message
    assert push_to(hang, describe=True).message.startswith("host tokyo at 127.0.0.1:")


def test_a_deadline_is_not_the_hosts_fault() -> None:
    refusal = push_to(hang, left_s=0.1)
    assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the deadline passed while" in refusal.message


def test_a_refusal_is_handed_on() -> None:
    refusal = push_to(refuse, describe=True)
    assert (refusal.code, refusal.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 700)
    assert refusal.message.endswith("refused: tokyo has 64 hops waiting")
    assert "did not answer" not in push_to(load).message


def test_a_server_of_another_kind() -> None:
    assert "is no stage server" in push_to(None).message


def test_a_crash_is_reported_as_such() -> None:
    refusal = push_to(crash)
    assert refusal.code is grpc.StatusCode.UNKNOWN
    assert "failed: " in refusal.message


def test_nobody_there() -> None:
    async def run() -> float | None:
        relay = Relay("127.0.0.1:1", 4 << 20, HOP_TIMEOUT_S)
        relay.rtt_ms = 1.0
        try:
            with pytest.raises(Refusal, match=r"cannot be reached \(.*refused\); see that it runs"):
                await relay.warm(10)
            return relay.rtt_ms
        finally:
            await relay.close()

    assert asyncio.run(run()) is None
