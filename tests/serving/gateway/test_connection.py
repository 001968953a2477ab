"""Bodies and connections have limits, and answers end with their client."""

import asyncio
import contextlib
import re
import select
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.server import ServerState

from serving.cli.ports import free_port_block
from serving.gateway import app as gateway
from serving.gateway import middleware
from serving.gateway.app import make_app, run_gateway
from serving.gateway.middleware import SECURITY_HEADERS, SMALL_BODY_BYTES
from serving.gateway.settings import HttpSettings
from tests.conftest import until
from tests.serving.gateway.conftest import run

LIVE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WAIT_S = 20.0


def started(servers: Any) -> int:
    """The port of a gateway in this process, without a router."""
    port = free_port_block(2)
    servers.run(lambda stop: run_gateway(HttpSettings(f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"), stop))
    with socket.socket() as probe:
        until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0)
    return port


@pytest.fixture
def port(servers: Any) -> int:
    return started(servers)


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


def test_a_body_that_does_not_arrive_is_a_408(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_S", 0.2)
    with dial(port) as connected:
        connected.sendall(POST + b"Content-Length: 10\r\n\r\n{")
        answer = b"".join(iter(partial(connected.recv, 4096), b""))  # to its end: the connection is closed at once
    assert answer.startswith(b"HTTP/1.1 408")


def test_the_memory_of_unfinished_large_bodies_is_limited(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODIES_BYTES", 100_000)  # one of these, and no other beside it
    head, rest = POST + b"Content-Length: 200000\r\n\r\n", b"x" * (SMALL_BODY_BYTES + 60_000)
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


@pytest.mark.slow
def test_a_slow_body_is_read_to_its_end(port: int) -> None:
    with dial(port) as connected:
        assert is_live(connected)
        connected.sendall(POST + b"Content-Length: 10\r\n\r\nslow ")
        time.sleep(0.5)
        connected.sendall(b"words")
        assert connected.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_connection_over_the_limit_closes_an_idle_one_or_is_refused(
    servers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 2)
    caplog.set_level("INFO")
    port = started(servers)
    with dial(port) as oldest, dial(port) as older, dial(port) as newest:
        assert is_live(newest)
        assert oldest.recv(1) == b"", "closed: it never asked anything"
        for busy in (older, newest):
            busy.sendall(POST + b"Content-Length: 10\r\n\r\nhalf")
        until(lambda: not select.select([older, newest], [], [], 0)[0])
        with dial(port) as refused:
            refused.sendall(LIVE)
            answer = b"".join(iter(partial(refused.recv, 4096), b""))
        assert re.match(rb'(?s)HTTP/1.1 503 .*retry-after: 1\r\n.*"type": "server_error"', answer)
        older.close()

    def served() -> bool:
        with dial(port) as later:
            later.sendall(LIVE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            return later.recv(4096).startswith(b"HTTP/1.1 200")

    until(served)
    assert not [each for each in caplog.records if each.name == "uvicorn.error"], "its words are no help here"
    assert not [each for each in caplog.records if vars(each).get("path") == "/healthz"], "probes that succeeded"


@pytest.mark.slow
@pytest.mark.parametrize(("files", "clients"), [(1024, 1050), (40, 60)])
def test_slow_clients_do_not_exhaust_file_descriptors(tmp_path: Path, files: int, clients: int) -> None:
    with run(tmp_path, "--router", f"127.0.0.1:{free_port_block(1)}", files=files) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for at in range(clients):
                silent = stack.enter_context(dial(port))
                silent.sendall(LIVE[:-2] if at % 2 else b"")
            for _ in range(3):
                assert httpx.get(f"{gateway.url}/healthz", timeout=2).status_code == 200
            assert httpx.get(f"{gateway.url}/readyz", timeout=5).status_code == 503, "it can still ask its router"
        assert len(gateway.log.read_text().splitlines()) < 100


def test_an_idle_connection_with_an_arriving_request_is_not_closed() -> None:
    loop = asyncio.new_event_loop()
    near, far = socket.socketpair()
    with near, far:
        config = gateway.WebServer(partial(print), HttpSettings()).config
        connection = gateway._Connection(config, ServerState(), {}, loop)
        transport: Any = FakeTransport(near)
        connection.connection_made(transport)
        far.sendall(b"G")
        connection.timeout_keep_alive_handler()
        assert not transport.closed
        near.recv(1)
        connection.timeout_keep_alive_handler()
        assert transport.closed
        near.close()
        connection.timeout_keep_alive_handler()  # the client left before
    loop.close()


class FakeTransport(asyncio.Transport):
    def __init__(self, near: socket.socket) -> None:
        super().__init__({"socket": near})
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


async def test_an_internal_error_has_the_security_headers() -> None:
    class Broken:
        async def status(self, **settings: object) -> None:
            raise ZeroDivisionError

    broken: Any = make_app(HttpSettings(), Broken())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(broken, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/api/hosts")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert SECURITY_HEADERS.items() <= answer.headers.items()
