"""A stage server without a model, and a relay to it, each with its certificate."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.auth import CallerGuard
from stages.wire.channel import bind, new_server
from stages.wire.hop_stream import Relay
from stages.wire.messages import PROTOCOL
from stages.wire.status import StatusError
from stages.wire.tls import Security, Tls

PATIENT_S = 20.0
NewPki = Callable[[str], Any]
Story = Callable[[Relay], Awaitable[Any]]


class Paris(stage_pb2_grpc.StageServiceServicer):
    """A stage server without a model."""

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Any) -> stage_pb2.DescribeResponse:
        return stage_pb2.DescribeResponse(name="paris", protocol=PROTOCOL)

    async def Subscribe(self, request: stage_pb2.SubscribeRequest, context: Any) -> Any:
        yield stage_pb2.Events()

    async def Release(self, request: stage_pb2.ReleaseRequest, context: Any) -> stage_pb2.ReleaseResponse:
        return stage_pb2.ReleaseResponse(released=len(request.sessions))


def with_relay(server_tls: Tls | None, tls: Tls | None, story: Story, listen: str = "127.0.0.1", dial: str = "") -> Any:
    """Run a story with a relay to a server that shows one certificate, the relay another."""

    async def run() -> Any:
        server = new_server(interceptors=[CallerGuard()] if server_tls else [])
        try:
            stage_pb2_grpc.add_StageServiceServicer_to_server(Paris(), server)
            port = bind(server, f"{listen}:0", Security(server_tls), mutual=True)
            await server.start()
            relay = Relay(f"{dial or listen}:{port}", 4 << 20, PATIENT_S, "paris", Security(tls))
            try:
                return await asyncio.wait_for(story(relay), 30)
            finally:
                await relay.close()
        finally:
            await server.stop(0)

    return asyncio.run(run())


async def describe(relay: Relay) -> str:
    """The host's name. A handshake that a busy machine did not end in time is begun again."""
    while True:
        try:
            return (await relay.describe(PATIENT_S)).name
        except StatusError as error:
            if "timed out" not in error.message and "Handshake read failed" not in error.message:
                raise
            await asyncio.sleep(0.05)


async def refusal(relay: Relay) -> StatusError:
    with pytest.raises(StatusError) as caught:
        await describe(relay)
    return caught.value
