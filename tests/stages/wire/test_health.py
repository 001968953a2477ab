"""Health over real sockets: one client that reads nothing holds up nobody, and no process from its end."""

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

Status = health_pb2.HealthCheckResponse
WITHIN_S = 30.0


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header without any table or Huffman code (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Deaf:
    """An HTTP/2 client of its own that watches, with a window of 0: nothing can be sent to it."""

    def __init__(self, address: str, method: str = "/grpc.health.v1.Health/Watch") -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WITHIN_S)
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": address}
        headers |= {"content-type": "application/grpc", "te": "trailers"}
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, struct.pack(">HI", 4, 0))  # SETTINGS_INITIAL_WINDOW_SIZE
            + frame(1, 4, 1, b"".join(literal(*header) for header in headers.items()))
            + frame(0, 1, 1, bytes(5))  # an empty message
        )

    def close(self) -> None:
        self.socket.close()


@asynccontextmanager
async def served(checks: HealthChecks) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    try:
        yield address, server
    finally:
        await server.stop(grace=0)


async def watched(checks: HealthChecks, count: int) -> None:
    while len(checks._watchers) != count:
        await asyncio.sleep(0.01)


async def test_watchers_hear_of_changes_and_of_the_end() -> None:
    checks = HealthChecks()
    async with asyncio.timeout(WITHIN_S), served(checks) as (address, _), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = aiter(stub.Watch(health_pb2.HealthCheckRequest(service="x")))
        assert (await anext(call)).status == Status.SERVICE_UNKNOWN
        checks.set("x", Status.SERVING)
        assert (await anext(call)).status == Status.SERVING
        checks.stop()
        checks.set("x", Status.SERVING)
        assert (await anext(call)).status == Status.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'y' here"):
            await stub.Check(health_pb2.HealthCheckRequest(service="y"))


async def test_a_client_that_reads_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = HealthChecks()
    async with asyncio.timeout(WITHIN_S), served(checks) as (address, _), open_channel(address) as channel:
        deaf = Deaf(address)
        await watched(checks, 1)
        call = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(call)).status == Status.SERVING
        checks.stop()
        assert (await anext(call)).status == Status.NOT_SERVING
        deaf.close()
        await watched(checks, 1)
    monkeypatch.setattr(channels, "MOST_WATCHERS", 0)
    async with asyncio.timeout(WITHIN_S), served(HealthChecks()) as (address, _), open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="0 clients watch already: use Check"):
            await anext(aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())))
