"""Health over real sockets: a client that reads nothing delays no other and no exit."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.wire import channel as channels
from stages.wire.channel import HealthChecks, bind, new_server, open_channel
from tests.conftest import eventually, started
from tests.fuzz.attacker import END_HEADERS, HEADERS, OPENING, SETTINGS, fields, frame

Status = health_pb2.HealthCheckResponse
WITHIN_S = 30.0


class Deaf:
    """An HTTP/2 client of its own that watches, with a window of 0: nothing can be sent to it."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WITHIN_S)
        self.socket.sendall(
            OPENING
            + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))  # SETTINGS_INITIAL_WINDOW_SIZE
            + frame(HEADERS, END_HEADERS, 1, fields("/grpc.health.v1.Health/Watch"))
            + frame(0, 1, 1, bytes(5))  # an empty message
        )

    def close(self) -> None:
        self.socket.close()


@asynccontextmanager
async def served(checks: HealthChecks) -> AsyncIterator[str]:
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    async with started(server):
        yield address


async def test_watchers_receive_every_change_and_the_end() -> None:
    checks = HealthChecks()
    async with asyncio.timeout(WITHIN_S), served(checks) as address, open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = aiter(stub.Watch(health_pb2.HealthCheckRequest(service="x")))
        assert (await anext(call)).status == Status.SERVICE_UNKNOWN
        checks.set("x", Status.SERVING)
        assert (await anext(call)).status == Status.SERVING
        checks.stop()
        checks.set("x", Status.SERVING)
        assert (await anext(call)).status == Status.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="unknown service 'y'"):
            await stub.Check(health_pb2.HealthCheckRequest(service="y"))


async def test_a_client_that_does_not_read_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = HealthChecks()
    async with asyncio.timeout(WITHIN_S), served(checks) as address, open_channel(address) as channel:
        deaf = Deaf(address)
        await eventually(lambda: len(checks._watchers) == 1)
        call = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(call)).status == Status.SERVING
        checks.stop()
        assert (await anext(call)).status == Status.NOT_SERVING
        deaf.close()
        await eventually(lambda: len(checks._watchers) == 1)
    monkeypatch.setattr(channels, "MAX_WATCHERS", 0)
    async with asyncio.timeout(WITHIN_S), served(HealthChecks()) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="0 clients are already watching: use Check"):
            await anext(aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())))
