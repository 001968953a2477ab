"""Inputs that fuzzing found, each as small as possible: docs/research/reliability.md lists them with their fixes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from serving.client.client import RouterError, _DrawnAnswer
from serving.router.host_link import HostLink
from serving.router.topology import HostEntry, local_topology, read_topology
from serving.v1 import router_pb2
from stages.errors import InputError
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import new_server
from stages.wire.hop_stream import Relay
from stages.wire.status import RETRY_AFTER, StatusError, retry_after_ms
from stages.wire.tokens import read_tokens
from tests.stages.scripted_server import Answering, push, take

NO_MESSAGE = b"\xff\xff\xff"
LONG = "9" * 5000
CALL_S = 20.0


def own(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Log records, but not of gRPC's poller: of several event loops in one process two may read one wake-up."""
    return [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()]


# Requests and answers that are no messages


class Honest(Answering):
    async def Subscribe(self, request: Any, context: Any) -> Any:
        yield stage_pb2.Events()


def lying_handler() -> grpc.GenericRpcHandler:
    async def one(request: bytes, context: Any) -> bytes:
        return NO_MESSAGE

    async def many(request: Any, context: Any) -> Any:
        yield NO_MESSAGE

    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(one),
        "Warm": grpc.unary_unary_rpc_method_handler(one),
        "Push": grpc.stream_stream_rpc_method_handler(many),
        "Subscribe": grpc.unary_stream_rpc_method_handler(many),
    }
    return grpc.method_handlers_generic_handler("stages.v1.StageService", handlers)


def served(story: Callable[[str], Awaitable[Any]], lying: bool = False) -> Any:
    async def run() -> Any:
        server = new_server()
        if lying:
            server.add_generic_rpc_handlers((lying_handler(),))
        else:
            stage_pb2_grpc.add_StageServiceServicer_to_server(Honest(take), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await story(f"127.0.0.1:{port}")
        finally:
            await server.stop(0)

    return asyncio.run(run())


async def raw_call(address: str, method: str, data: bytes) -> tuple[grpc.StatusCode, int]:
    """The final status, and the number of answers before it."""
    sent = [stage_pb2.HopBatch(number=1).SerializeToString(), data] if method == "Push" else [data]
    async with grpc.aio.insecure_channel(address) as channel:
        call, count = channel.stream_stream(f"/stages.v1.StageService/{method}"), 0  # a unary call has one message
        try:
            async for _ in call(iter(sent), timeout=CALL_S):
                count += 1
        except grpc.aio.AioRpcError as error:
            return error.code(), count
        return grpc.StatusCode.OK, count


@pytest.mark.parametrize("method", ["Describe", "Subscribe", "Push"])
def test_a_malformed_request_message_is_refused(method: str, caplog: pytest.LogCaptureFixture) -> None:
    code, answers = served(lambda address: raw_call(address, method, NO_MESSAGE))
    assert code is grpc.StatusCode.INVALID_ARGUMENT, "it was UNKNOWN, with a traceback in the log"
    assert answers <= 1
    assert not own(caplog)
    code, answers = served(lambda address: raw_call(address, method, b""))
    assert (code, answers) == (grpc.StatusCode.OK, 2 if method == "Push" else 1)


def test_a_malformed_answer_fails_the_call(caplog: pytest.LogCaptureFixture) -> None:
    async def story(address: str) -> None:
        relay = Relay(address, 1 << 20, CALL_S)
        try:
            for call in (relay.describe(CALL_S), relay.warm(0)):
                with pytest.raises(StatusError, match="the answer is not a message"):
                    await call
            hop = stage_pb2.Hop(session="s", left_s=1 << 42)
            with pytest.raises(StatusError, match="the answer is not a message"):
                await push(relay, hop)
        finally:
            await relay.close()

    served(story, lying=True)
    assert not own(caplog), "it ended the task that looks after the link, and left a traceback"


# Numbers at the ends of their fields


@pytest.mark.parametrize(("text", "due"), [("250", 250), ("", None), ("soon", None), ("-1", None), ("9" * 5000, None)])
def test_an_invalid_retry_time_is_ignored(text: str, due: int | None) -> None:
    assert retry_after_ms({RETRY_AFTER: text}) == due


@pytest.mark.parametrize(("rtt_ms", "problem"), [(1.5, ""), (float("nan"), "impossible round trips")])
async def test_an_impossible_round_trip_time_is_reported(rtt_ms: float, problem: str) -> None:
    link = HostLink(HostEntry("h", "127.0.0.1:1", (0,), "127.0.0.1:1"), CALL_S)
    info = stage_pb2.DescribeResponse(name="h", blocks=[0], ready=True)
    info.links.add(address="127.0.0.1:2", rtt_ms=rtt_ms)

    async def describe(timeout: float, *_: object) -> stage_pb2.DescribeResponse:
        return info

    link.relay.describe = describe  # type: ignore[method-assign]
    await link.describe()
    await link.relay.close()
    assert problem in link.problem
    assert bool(problem) == bool(link.problem)


def test_pictures_that_do_not_match_their_header_are_an_error() -> None:
    answer = _DrawnAnswer(None)
    answer.read(
        router_pb2.DrawResponse(pictures=router_pb2.Pictures(pixels=bytes(784), count=1, channels=1, height=28))
    )
    answer.read(router_pb2.DrawResponse(summary=router_pb2.DrawSummary()))
    with pytest.raises(RouterError, match="pictures do not have the size in their header"):
        answer.end()


# Files


@pytest.mark.parametrize("number", [LONG, f"0x{'f' * 5000}"])
def test_a_number_of_5000_digits_in_toml_is_refused(number: str, tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    for read, text in (
        (read_topology, local_topology(1, 1, tmp_path).to_toml().replace('"host-1"', number)),
        (read_tokens, f'[[keys]]\nname = {number}\nsha256 = "x"\n'),
    ):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(InputError, match=r"file\.toml"):
            read(path)
