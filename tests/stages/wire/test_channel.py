"""Addresses, names, and who may listen where."""

import asyncio
import contextlib
import gc
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from stages.errors import InputError, ServiceError
from stages.host.server import StageServer
from stages.host.settings import HostSettings, StageSettings
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire import channel, places
from stages.wire.auth import SERVICE
from stages.wire.channel import (
    CallBounds,
    bind,
    check_name,
    is_loopback,
    new_server,
    open_blocking_channel,
    open_channel,
    parse_address,
)
from stages.wire.places import Places
from stages.wire.status import DecodeErrors
from stages.wire.tls import Security
from tests.conftest import PATIENCE_S, refused, started, until
from tests.fuzz.attacker import ACK, OPENING, PING, SETTINGS, frame


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("[fe80::1%eth0]:77", ("fe80::1%eth0", 77)), ("[::1]:80", ("::1", 80)), ("oslo-1.no:0", ("oslo-1.no", 0))],
)
def test_an_address_has_a_host_and_a_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


NO_ADDRESSES = ("", ":", "x", "x:", ":80", "x:65536", "x:-1", "x:²", "x:٣", "::1", "::1:80", "x y:80", "x/y:80")
NO_NAMES = ("", "-x", ".x", "a b", "a/b", "é", "a\n", "\udcff", "x" * 65)


@pytest.mark.parametrize(
    ("check", "text", "says"),
    [
        *((parse_address, each, "must be HOST:PORT") for each in (*NO_ADDRESSES, "x:1\n", "x:000001", "x" * 64 + ":1")),
        (parse_address, "http://127.0.0.1:7700/v1", ": write 127.0.0.1:7700$"),
        (parse_address, "https://example.org", ": write example.org:PORT$"),
        (parse_address, "::1:7700", r": write \[::1\]:7700$"),
        *((check_name, each, "must be 1 to 64 letters") for each in NO_NAMES),
    ],
)
def test_invalid_addresses_and_names_are_refused(check: Callable[[str], object], text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check(text)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        *(("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True)),
        *(("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False), ("example.org:1", False)),
    ],
)
def test_loopback_addresses_are_recognized(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
async def test_unencrypted_traffic_to_other_machines_is_logged(address: str, caplog: pytest.LogCaptureFixture) -> None:
    server = new_server()
    assert bind(server, address, Security(insecure=True)) > 0
    await server.stop(0)
    messages = [record.message for record in caplog.records if record.name == "stages.wire.channel"]
    due = f"{address} can be reached from other machines, and its traffic is not encrypted"
    assert messages == ([] if is_loopback(address) else [due])


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_MS", 200)
    port = bind(server := new_server(), "127.0.0.1:0")
    async with started(server):
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert b"timeout" in await asyncio.wait_for(
            reader.read(), PATIENCE_S
        )  # bytes of the handshake, or the first ones
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(OPENING)  # and never takes the server's settings
        assert b"timeout" in await asyncio.wait_for(reader.read(), PATIENCE_S)


@pytest.mark.slow
async def test_a_client_that_answers_no_ping_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PING_MS", 200)
    port = bind(server := new_server(), "127.0.0.1:0")
    async with started(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(OPENING + frame(SETTINGS, ACK, 0, b""))
        assert b"ping_timeout" in await asyncio.wait_for(reader.read(), PATIENCE_S)  # gRPC pings after 10 s


async def test_connections_over_the_limit_are_closed_and_all_pings_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(places, "CHECK_S", 3600)
    port = bind(server := new_server(), "127.0.0.1:0")
    async with started(server), asyncio.timeout(PATIENCE_S):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in opened:
            writer.write(OPENING)
            await reader.readexactly(9)
        with contextlib.suppress(ConnectionError):
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
        reader, writer = opened[0]
        for _ in range(20):
            writer.write(frame(PING, 0, 0, b"to and f") * 50)
            for _ in range(50):
                await reader.readuntil(frame(PING, ACK, 0, b"to and f"))  # and none gets a GOAWAY


async def test_a_server_checks_its_connections_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(places, "CHECK_S", 0.01)
    port = bind(server := new_server(), "127.0.0.1:0")
    async with started(server):
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        # the timeout of the handshake comes later
        assert b"timeout" not in await asyncio.wait_for(reader.read(), PATIENCE_S)


def test_a_server_is_freed_with_its_loop() -> None:
    async def serve() -> weakref.ref[Places]:
        bind(server := new_server(), "127.0.0.1:0")
        await asyncio.sleep(0)  # its connections are watched, until the loop cancels that
        return weakref.ref(channel._PLACES[server])

    watching = asyncio.run(serve())
    gc.collect()
    assert watching() is None, "a server that is freed at the interpreter's exit prints an error without words"


async def test_the_oldest_connections_without_a_call_are_closed_first() -> None:
    callers = []

    async def call(request: bytes, context: Any) -> Any:
        callers.append(context.peer())
        return b"" if request else await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a stranger")

    server = grpc.aio.server(interceptors=[DecodeErrors(), room := Places(4)])
    handlers: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a.Service", handlers)])
    port = server.add_insecure_port("[::]:0")
    async with started(server):
        apart = [("grpc.use_local_subchannel_pool", 1)]
        strange = grpc.aio.insecure_channel(f"127.0.0.1:{port}", apart)
        async with asyncio.timeout(PATIENCE_S), strange, open_channel(f"127.0.0.1:{port}") as opened:
            refused: Any = strange.unary_unary("/a.Service/Call")
            with pytest.raises(grpc.aio.AioRpcError):
                await refused(b"")
            method: Any = opened.unary_unary("/a.Service/Call")
            await method(b"known")
            silent = []
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(OPENING)
                await reader.readexactly(9)  # it has a place
                silent.append((reader, writer))  # a writer without a reference closes its connection
                await room.make_room(port)
                for gone, _ in silent[:-2]:
                    await gone.read()  # to its end
            await strange.wait_for_state_change(grpc.ChannelConnectivity.READY)  # it is closed
            await method(b"known")
            assert callers[1] == callers[2]
            assert not any(reader.at_eof() for reader, _ in silent[-2:])


@pytest.mark.slow
async def test_a_distant_server_is_reached_at_the_first_attempt() -> None:
    """A call that does not wait fails with the first attempt to connect, whose answer takes half a second here."""
    port = bind(server := new_server(), "127.0.0.1:0")
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    async with started(server):

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                await asyncio.sleep(0.25)
                writer.write(data)
            writer.close()

        async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs, ours = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(carry(reader, ours), carry(theirs, writer))

        far = await asyncio.start_server(joined, "127.0.0.1", 0)
        async with far, open_channel(f"127.0.0.1:{far.sockets[0].getsockname()[1]}") as opened:
            answer = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
def test_a_blocking_channel_keeps_trying_its_first_connection() -> None:
    """Over a far link, a worker is at its coordinator with the first connection that it makes."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open_blocking_channel(f"127.0.0.1:{listener.getsockname()[1]}") as opened,
    ):
        grpc.channel_ready_future(opened)
        first, _ = listener.accept()
        with first:  # it answers nothing, as if it were far
            time.sleep(0.5)  # longer than gRPC would wait before its second try, and its third
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


# The health port: what a probe may ask, and nothing else. With a real server.


def test_the_health_port_serves_liveness_and_readiness_only(bundles: Path, servers: Any, unused_port: int) -> None:
    where = f"127.0.0.1:{unused_port}"
    host = HostSettings("whole")
    settings = StageSettings(bundles / "own", (0, 1, 2), "127.0.0.1:0", (), host, threads=1, health=where)
    running = servers.run(StageServer(settings).run)
    with grpc.insecure_channel(where) as wire:
        probe = health_pb2_grpc.HealthStub(wire)

        def status(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = probe.Check(request, wait_for_ready=True, timeout=PATIENCE_S)
            return int(answer.status)

        assert status("") == health_pb2.HealthCheckResponse.SERVING
        until(lambda: status(SERVICE) == health_pb2.HealthCheckResponse.SERVING)
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            stage_pb2_grpc.StageServiceStub(wire).Describe(stage_pb2.DescribeRequest(), timeout=PATIENCE_S)
    running.end()


@pytest.mark.parametrize(("where", "error"), [("here", InputError), ("192.0.2.1:7701", ServiceError)])
async def test_an_unusable_health_address_is_an_error(bundles: Path, where: str, error: type[Exception]) -> None:
    settings = StageSettings(bundles / "own", (0,), "127.0.0.1:0", (), HostSettings("host"), health=where)
    with pytest.raises(error):
        await StageServer(settings).run(asyncio.Event())


async def test_callers_are_forgotten_with_their_calls() -> None:
    bounds, requests = CallBounds(), MagicMock()
    requests.__anext__.return_value = None
    for caller in ("alice", ""):
        assert await bounds._next(requests, caller, 64) is None
    assert not bounds._arriving
