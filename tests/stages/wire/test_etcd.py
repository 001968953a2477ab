"""Hosts register in a real etcd, and are followed there, whatever becomes of them and of it."""

import asyncio
import contextlib
import http.server
import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from etcd3gw.client import Etcd3Client

from stages.errors import ServiceError
from stages.wire import etcd
from stages.wire.auth import HOST
from stages.wire.etcd import EtcdClient, EtcdRegistry
from stages.wire.registry import Registration, RegistrySettings, follow_successors, parse_url, write_entry
from stages.wire.tls import Tls
from tests.conftest import PATIENCE_S, eventually, jobs

LEASE_S = 2
"""The shortest that etcd grants."""
REGISTER = """
import asyncio, sys
from stages.wire.registry import Registration, RegistrySettings, parse_url
from stages.wire.etcd import EtcdRegistry
registry = EtcdRegistry(RegistrySettings(*parse_url(sys.argv[1])), lease_s=2)
asyncio.run(registry.register(Registration("victim", "127.0.0.1:9", (0,))))
"""


def settings_of(url: str) -> RegistrySettings:
    return RegistrySettings(*parse_url(url))


def host(name: str, port: int = 7701, block: int = 0) -> Registration:
    return Registration(name, f"127.0.0.1:{port}", (block,))


class Recorder:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.sets: list[list[str]] = []

    async def follow(self, registry: EtcdRegistry) -> None:
        async with contextlib.aclosing(registry.follow()) as changes:
            async for registrations in changes:
                self.sets.append([host.name for host in registrations])

    def last(self, *names: str) -> Callable[[], bool]:
        return lambda: self.sets[-1:] == [list(names)]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def registry(registry_url: str) -> EtcdRegistry:
    return EtcdRegistry(settings_of(registry_url), LEASE_S)


@pytest.fixture
def own_etcd(etcd_with: Callable[..., Any]) -> Iterator[Any]:
    """One that may be harmed."""
    with etcd_with() as etcd:
        yield etcd


async def test_hosts_come_and_go(registry: EtcdRegistry, recorder: Recorder) -> None:
    await registry.check()
    async with jobs(recorder.follow(registry)):
        await eventually(recorder.last())
        async with jobs(registry.register(host("tokyo", 7702, block=1))):
            await eventually(recorder.last("tokyo"))
            async with jobs(registry.register(host("paris", 7701))):
                await eventually(recorder.last("paris", "tokyo"))  # in the order of their blocks
            # one that stops has taken its entry away: nobody waits for a lease
            left = await asyncio.to_thread(EtcdClient(registry.settings).snapshot)
            assert [entry.name for entry in left] == ["tokyo"]
            await eventually(recorder.last("tokyo"))


async def test_a_host_that_is_killed_disappears(registry: EtcdRegistry, recorder: Recorder) -> None:
    async with jobs(recorder.follow(registry), registry.register(host("paris"))):
        victim = subprocess.Popen([sys.executable, "-c", REGISTER, registry.settings.url])
        try:
            await eventually(recorder.last("paris", "victim"))
        finally:
            victim.kill()
            victim.wait(PATIENCE_S)
        await eventually(recorder.last("paris"))


async def test_of_two_hosts_with_one_name_the_first_says_so(
    registry: EtcdRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    async with jobs(registry.register(host("paris"))):
        await eventually(lambda: EtcdClient(registry.settings).snapshot())
        async with jobs(registry.register(host("paris", 7799))):
            await eventually(lambda: caplog.records)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["another host registered as paris"]


async def test_etcd_goes_and_comes_back(own_etcd: Any, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry = EtcdRegistry(settings_of(own_etcd.url), LEASE_S)

    def said(words: str) -> int:
        return sum(words in record.getMessage() for record in caplog.records)

    async with jobs(recorder.follow(registry), registry.register(host("paris"))):
        await eventually(recorder.last("paris"))
        own_etcd.kill()
        await eventually(lambda: said("is down") == 2)
        own_etcd.start()
        await eventually(lambda: said(f"{own_etcd.url} is back") == 2)
        async with jobs(registry.register(host("tokyo", 7702))):
            await eventually(recorder.last("paris", "tokyo"))
    assert said("is down") == 2  # the host once, the follower once
    assert [] not in recorder.sets[1:]


async def test_bad_entries_are_passed_over_with_one_line_each(
    registry: EtcdRegistry, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = EtcdClient(registry.settings)
    lease = gateway.ask(lambda member: member.lease(60))
    values = {"paris": b"{", "a/b": b"{}", "bell\a": b"{}", "rome": write_entry(host("paris")), "vast": b"9" * 20_000}
    for name, value in values.items():
        gateway.ask(partial(Etcd3Client.put, key=gateway.key(name), value=value, lease=lease))

    async with jobs(recorder.follow(registry)):
        await eventually(recorder.last())
        async with jobs(registry.register(host("tokyo"))):
            await eventually(recorder.last("tokyo"))
        await eventually(recorder.last())
    assert sorted(message.split("'")[1] for message in caplog.messages) == sorted(
        name.replace("\a", "\\x07") for name in values
    )


async def test_next_hosts_are_told(registry: EtcdRegistry) -> None:
    told: list[list[str]] = []

    own = host("paris")
    async with jobs(registry.register(own), follow_successors(registry, own, 2, lambda new: told.append([*new]))):
        await eventually(lambda: told == [[]])
        async with jobs(registry.register(host("tokyo", 7702, block=1))):
            await eventually(lambda: told[1:] == [["127.0.0.1:7702"]])
            async with jobs(registry.register(host("austin", 7703, block=1))):
                await eventually(lambda: told[2:] == [["127.0.0.1:7703", "127.0.0.1:7702"]])
        await eventually(lambda: told[-1] == [])


# Who does not answer
@contextlib.contextmanager
def answering(status: int, body: Iterable[bytes], length: int) -> Iterator[int]:
    """A server that says the same to everybody; its port."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client hangs up
                self.wfile.writelines(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()


def check(port: int) -> str:
    with pytest.raises(ServiceError) as caught:
        asyncio.run(EtcdRegistry(settings_of(f"etcd://127.0.0.1:{port}/onesweep")).check())
    return str(caught.value)


def test_an_absent_etcd_is_named(unused_port: int) -> None:
    assert check(unused_port) == (
        f"no registry answers at etcd://127.0.0.1:{unused_port}/onesweep "
        f"(127.0.0.1:{unused_port} refuses connections): "
        "start etcd there, or put --registry right"
    )


@pytest.mark.parametrize(
    ("status", "body", "length"),
    [
        (200, b"[" * 100_000, 100_000),
        (200, b'{"header"', 1000),
        (200, b"{}", 2),
        (200, b'{"result": []}', 14),
        (503, b"unav", 1000),
    ],
    ids=["deep", "cut", "other", "odd", "busy"],
)
async def test_an_answer_that_is_none_is_a_registry_that_is_down(
    status: int, body: bytes, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever registers, or follows, continues."""
    caplog.set_level(logging.INFO)
    with answering(status, [body], length) as port:
        registry = EtcdRegistry(settings_of(f"etcd://127.0.0.1:{port}/onesweep"), LEASE_S)
        with pytest.raises(ServiceError, match="no registry answers"):
            await registry.check()
        async with jobs(Recorder().follow(registry), registry.register(host("paris"))):
            await eventually(lambda: len([message for message in caplog.messages if "is down" in message]) == 2)


@pytest.mark.parametrize(("limit", "value"), [("MAX_ANSWER_BYTES", 1 << 20), ("ANSWER_S", 0.05)])
def test_an_answer_ends(limit: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ANSWER_BYTES", "ANSWER_S"):
        monkeypatch.setattr(etcd, name, value if name == limit else 1 << 40)
    with answering(200, itertools.repeat(b" " * 4096), 1 << 40) as port:
        assert "an answer of more than" in check(port)


# A registry that is spoken to over TLS, with a certificate on both sides.


def test_who_shows_a_certificate_is_let_in(new_pki: Callable[[str], Any], etcd_with: Callable[..., Any]) -> None:
    # etcd's gateway is a client of its own server, with the server's certificate
    own, other = new_pki("own"), new_pki("other")
    server, paris, stranger = own.issue(HOST, "etcd"), own.issue(HOST, "paris"), other.issue(HOST, "stranger")

    def check(ca: Path, shown: Tls | None) -> None:
        pair = {"cert": shown.certificate, "key": shown.key} if shown else {}
        asyncio.run(EtcdRegistry(RegistrySettings(*where, ca=ca, **pair)).check())

    files = {"ca": server.authority, "cert": server.certificate, "key": server.key}
    with etcd_with("--client-cert-auth", tls=files) as etcd:
        where = parse_url(etcd.url)
        check(server.authority, paris)
        for shown in (stranger, None):
            with pytest.raises(ServiceError, match="no registry answers"):
                check(server.authority, shown)
        with pytest.raises(ServiceError, match="CERTIFICATE_VERIFY_FAILED"):
            check(stranger.authority, paris)
