"""Connections that nobody may hold open for ever, and answers that end with whoever waits for them."""

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import httpx
import pytest

from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.gateway import middleware
from onesweep.serving.gateway.app import make_app, run_gateway
from onesweep.serving.gateway.commands import HttpSettings
from onesweep.serving.gateway.completions import EventStream
from onesweep.serving.gateway.middleware import SECURITY_HEADERS, HttpCounters
from onesweep.stages.wire import web_server
from tests.conftest import until

LIVE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WAIT_S = 20.0


@pytest.fixture
def port(servers: Any) -> int:
    """Of a gateway in this process, without a router."""
    port = free_port_block(2)
    servers.run(lambda stop: run_gateway(HttpSettings(f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"), stop))
    with socket.socket() as probe:
        until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0)
    return port


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def is_live(connected: socket.socket) -> bool:
    connected.sendall(LIVE)
    answer = b""
    while not answer.endswith(b"}"):
        if not (more := connected.recv(4096)):
            return False
        answer += more
    return True


def send_until_closed(connected: socket.socket, data: bytes, pause_s: float = 0.0) -> None:
    """Fails when it is still open after WAIT_S."""
    end = time.monotonic() + WAIT_S
    with contextlib.suppress(ConnectionError):
        while True:
            assert time.monotonic() < end, "it is open for ever"
            connected.sendall(data)
            time.sleep(pause_s)


def test_a_refused_body_is_not_read_for_ever(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with dial(port) as connected:
        assert is_live(connected)
        monkeypatch.setattr(web_server, "HEAD_S", 0.2)
        connected.sendall(POST + b"Content-Length: 3000000\r\n\r\n")
        assert connected.recv(4096).startswith(b"HTTP/1.1 413")
        send_until_closed(connected, b"x", pause_s=0.02)


def test_an_answer_that_is_not_read_is_not_kept(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "UNREAD_S", 0.2)
    with dial(port) as connected:
        send_until_closed(connected, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)


def test_a_body_that_does_not_come_is_a_408(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_S", 0.2)
    with dial(port) as connected:
        connected.sendall(POST + b"Content-Length: 10\r\n\r\n{")
        answer = b"".join(iter(partial(connected.recv, 4096), b""))  # to its end: the connection is closed at once
    assert answer.startswith(b"HTTP/1.1 408")


def test_large_bodies_that_do_not_end_have_so_much_memory_together(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODIES_BYTES", 100_000)  # one of these, and no other beside it
    head, rest = POST + b"Content-Length: 200000\r\n\r\n", b"x" * (middleware.SMALL_BODY_BYTES + 60_000)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(dial(port)) for _ in range(4)]
        for connected in slow:
            connected.sendall(head + rest)
        refused = list[socket.socket]()
        while len(refused) < 3:
            ready = select.select([each for each in slow if each not in refused], [], [], WAIT_S)[0]
            assert ready, "all of them are kept"
            assert all(each.recv(4096).startswith(b"HTTP/1.1 503") for each in ready)
            refused += ready
        usual = stack.enter_context(dial(port))
        usual.sendall(POST + b"Content-Length: 10\r\n\r\nsome words")
        assert usual.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_body_that_comes_slowly_is_read_to_its_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with dial(port) as connected:
        assert is_live(connected)
        monkeypatch.setattr(web_server, "HEAD_S", 0.1)  # for heads: this connection has had its first one
        connected.sendall(POST + b"Content-Length: 10\r\n\r\nslow ")
        time.sleep(0.5)
        connected.sendall(b"words")
        assert connected.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_connection_too_many_is_closed_and_the_others_go_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with dial(port) as first, dial(port) as second:
        assert is_live(first)
        assert is_live(second)
        monkeypatch.setattr(web_server.Connection, "max_connections", 2)
        with dial(port) as third, contextlib.suppress(ConnectionError):
            assert third.recv(1) == b""
        assert is_live(first)
        assert is_live(second)


def test_http_2_is_not_asked_of_the_app(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with dial(port) as connected:
        connected.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        answer = b"".join(iter(partial(connected.recv, 4096), b""))
    assert answer.startswith(b"HTTP/1.1 505")
    assert not caplog.records


def test_silent_connections_make_room_for_one_that_asks(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with dial(port) as asked, dial(port) as silent, dial(port) as other:
        assert is_live(asked)
        monkeypatch.setattr(web_server.Connection, "max_connections", 2)
        with dial(port) as late:
            assert is_live(late)
            assert is_live(asked)
            assert b"" in (each.recv(1) for each in (silent, other))


def test_a_request_that_was_not_read_yet_keeps_its_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, made = threading.Event(), web_server.Connection.connection_made

    def stalls(connection: web_server.Connection, transport: asyncio.Transport) -> None:
        stalled.wait(WAIT_S)
        made(connection, transport)

    monkeypatch.setattr(web_server.Connection, "max_connections", 2)
    monkeypatch.setattr(web_server.Connection, "connection_made", stalls)
    with dial(port), dial(port) as asks:
        asks.sendall(LIVE)
        with dial(port), dial(port):
            stalled.set()
            assert asks.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_failure_of_its_own_is_locked_down_too() -> None:
    class Broken:
        async def status(self, **settings: object) -> None:
            raise ZeroDivisionError

    async def main() -> httpx.Response:
        app: Any = make_app(HttpSettings(), Broken(), HttpCounters())  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/api/hosts")

    answer = asyncio.run(main())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert SECURITY_HEADERS.items() <= answer.headers.items()


def test_events_end_with_an_answer_that_never_began() -> None:
    ended = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            yield b"second"
        finally:
            ended.append(True)

    async def never(*message: object) -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        source = events()
        sending = asyncio.create_task(EventStream(await anext(source), source)({}, never, never))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait({sending})
        assert ended

    asyncio.run(main())
