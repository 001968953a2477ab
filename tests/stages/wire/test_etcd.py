"""Hosts register in a real etcd, and are followed there, whatever becomes of them and of it."""

import asyncio
import contextlib
import datetime
import http.server
import ipaddress
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
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from etcd3gw.client import Etcd3Client

from stages.errors import ServiceError
from stages.wire import etcd
from stages.wire.etcd import EtcdClient, EtcdRegistry
from stages.wire.registry import Registration, RegistrySettings, follow_successors, parse_url, write_entry
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
def test_an_answer_that_is_none_is_a_registry_that_is_down(
    status: int, body: bytes, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever registers, or follows, continues."""
    caplog.set_level(logging.INFO)

    async def scene(port: int) -> None:
        registry = EtcdRegistry(settings_of(f"etcd://127.0.0.1:{port}/onesweep"), LEASE_S)
        with pytest.raises(ServiceError, match="no registry answers"):
            await registry.check()
        async with jobs(Recorder().follow(registry), registry.register(host("paris"))):
            await eventually(lambda: len([message for message in caplog.messages if "is down" in message]) == 2)

    with answering(status, [body], length) as port:
        asyncio.run(scene(port))


@pytest.mark.parametrize(("limit", "value"), [("MAX_ANSWER_BYTES", 1 << 20), ("ANSWER_S", 0.05)])
def test_an_answer_ends(limit: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ANSWER_BYTES", "ANSWER_S"):
        monkeypatch.setattr(etcd, name, value if name == limit else 1 << 40)
    with answering(200, itertools.repeat(b" " * 4096), 1 << 40) as port:
        assert "an answer of more than" in check(port)


# A registry that is spoken to over TLS, with a certificate on both sides.


def write_identity(directory: Path, name: str, authority: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """`name`.pem and `name`.key for 127.0.0.1, signed by an authority or by itself."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    issuer, signer = (authority[0].subject, authority[1]) if authority else (subject, key)
    # etcd's gateway is a client of its own server, with the server's certificate
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(usages, critical=False)
        .sign(signer, hashes.SHA256())
    )
    (directory / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (directory / f"{name}.key").write_bytes(pem)
    return certificate, key


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    authority = write_identity(tmp_path, "authority", None)
    write_identity(tmp_path, "etcd", authority)
    write_identity(tmp_path, "paris", authority)
    write_identity(tmp_path, "stranger", None)
    return tmp_path


def test_who_shows_a_certificate_is_let_in(identities: Path, etcd_with: Callable[..., Any]) -> None:
    names = {"ca": "authority.pem", "cert": "etcd.pem", "key": "etcd.key"}
    files = {kind: identities / name for kind, name in names.items()}

    def check(ca: str, name: str | None) -> None:
        pair = {"cert": identities / f"{name}.pem", "key": identities / f"{name}.key"} if name else {}
        asyncio.run(EtcdRegistry(RegistrySettings(*where, ca=identities / ca, **pair)).check())

    with etcd_with("--client-cert-auth", tls=files) as etcd:
        where = parse_url(etcd.url)
        check("authority.pem", "paris")
        for name in ("stranger", None):
            with pytest.raises(ServiceError, match="no registry answers"):
                check("authority.pem", name)
        with pytest.raises(ServiceError, match="CERTIFICATE_VERIFY_FAILED"):
            check("stranger.pem", "paris")
