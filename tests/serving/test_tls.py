"""Rings over TLS, and routers that want a token: real handshakes on loopback."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.cli.serve import status_lines
from serving.client.client import AsyncClient, Client, RequestRefused, Result, RouterError, Tls
from serving.gateway.app import OwnCertificate
from serving.router.settings import AdmissionSettings
from serving.router.topology import HostEntry, Topology, read_topology
from serving.v1 import router_pb2
from stages.errors import InputError
from stages.wire.auth import CLIENT, ROUTER
from stages.wire.certificates import Authority
from stages.wire.channel import MAX_ARRIVING, open_channel
from stages.wire.status import CALLS
from stages.wire.tls import Security, ending
from stages.wire.tokens import Key, new_token, token_hash, write_tokens
from tests.conftest import Pki, Run, refused, until

NewPki = Callable[[str], Any]


# A router that needs no hosts, for all of these


@dataclass(frozen=True)
class Served:
    """A router over TLS: its address, the authority of its certificate, and the keys and tokens that it knows."""

    address: str
    pki: Any
    tokens: dict[str, str]
    keys: list[Key]
    file: Path

    @property
    def ca(self) -> Tls:
        return Tls(self.pki.authority.directory / "ca.pem")

    def client(self, name: str = "alice", tls: Tls | None = None) -> Client:
        return Client(self.address, tls=tls or self.ca, token=self.tokens.get(name, name))


LIMITS: dict[str, dict[str, Any]] = {
    "alice": {},
    "root": {"scopes": ("admin",)},
    "watcher": {"scopes": ("status",)},
    "slow": {"rate": 1e-3},
    "greedy": {"bytes_per_day": 12},
    "hasty": {"bytes_per_day": 11},
}


def ask(client: Client, max_bytes: int = 4) -> int:
    return client.generate("x", mode="local", max_bytes=max_bytes).output_bytes


def answered(client: Client) -> int:
    try:
        return ask(client)
    except RouterError:
        return 0


@pytest.fixture(scope="module")
def served(bundles: Path, module_servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory, address = tmp_path_factory.mktemp("served"), f"127.0.0.1:{free_port_block(1)}"
    tokens = {name: new_token() for name in LIMITS}
    usual = {"scopes": ("generate", "status")}
    keys = [Key(**{"name": n, "sha256": token_hash(tokens[n]), **usual, **limits}) for n, limits in LIMITS.items()]
    write_tokens(directory / "tokens.toml", keys)
    pki = Pki(Authority.create(directory / "certs", days=10))
    topology = Topology((HostEntry("h", "127.0.0.1:1", (0, 1, 2), "127.0.0.1:1"),), address)
    security, limits = Security(pki.issue(ROUTER, "router")), AdmissionSettings(request_limit=8)
    module_servers.router(
        topology, bundles / "own", security=security, tokens=directory / "tokens.toml", admission=limits
    )
    router = Served(address, pki, tokens, keys, directory / "tokens.toml")
    with router.client() as client:
        until(lambda: answered(client))
    return router


def test_a_router_checks_tokens(served: Served) -> None:
    with served.client() as client:
        assert ask(client) == 4
        assert not (status := client.status()).ready
        assert next(status_lines(status)).endswith(f"of 8 requests; {ending(status.certificate_until_s)}")
    with served.client("root") as client:
        assert ask(client) == 4
    for token, code, says in (
        ("", grpc.StatusCode.UNAUTHENTICATED, "a token is required: give --token-file"),
        ("nonsense", grpc.StatusCode.UNAUTHENTICATED, "unknown token"),
        ("watcher", grpc.StatusCode.PERMISSION_DENIED, "key watcher lacks scope generate: it has only status"),
    ):
        with served.client(token) as client, refused(code, says):
            ask(client)
    with served.client("") as client, pytest.raises(RequestRefused, match="a token is required"):
        client.status()
    write_tokens(served.file, [])
    try:
        with served.client() as client, pytest.raises(RequestRefused, match="unknown token"):
            ask(client)
    finally:
        write_tokens(served.file, served.keys)


async def test_incomplete_requests_without_a_token_are_limited(served: Served) -> None:
    path = "/serving.v1.RouterService/"
    security = Security(served.ca)
    async with open_channel(served.address, security=security) as stranger:
        silent = [stranger.stream_unary(path + "Generate")() for _ in range(MAX_ARRIVING + 3)]
        codes = asyncio.as_completed([asyncio.ensure_future(call.code()) for call in silent])
        for _ in range(3):
            assert await next(codes) is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with AsyncClient(served.address, tls=served.ca, token=served.tokens["alice"]) as alice:
            assert (await alice.generate("x", mode="local", max_bytes=4)).output_bytes == 4
        known = (("authorization", f"Bearer {served.tokens['alice']}"),)
        large = stranger.unary_unary(path + "Status")(b"\xfa\x7f\xff\xff\x07" + bytes(131071), metadata=known)
        assert await large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limit is 65536" in await large.details()
        for call in silent:
            call.cancel()


def test_a_router_enforces_quotas(served: Served) -> None:
    with served.client("slow") as client:
        ask(client)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, r"key slow may start 0\.001 requests per second") as caught:
            ask(client)
        assert (caught.value.retry_after_ms or 0) > 900_000
    with served.client("greedy") as client:
        assert ask(client, 8) == 8
        with pytest.raises(RouterError, match="3 are left until midnight UTC, and the request may need 4"):
            ask(client, 3)
        assert ask(client, 2) == 2
        asked = router_pb2.TokenizeRequest(mode="local", text=b"x", protocol=CALLS)
        with pytest.raises(grpc.RpcError, match="0 are left until midnight UTC"):
            client._stubs[0].Tokenize(asked, metadata=client._metadata)


async def test_text_of_a_cancelled_answer_counts_to_the_quota(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()

    async def stuck(*given: Any) -> AsyncIterator[bytes]:
        yield b"four"
        written.set()
        await asyncio.Event().wait()

    async with AsyncClient(served.address, tls=served.ca, token=served.tokens["hasty"]) as client:
        with monkeypatch.context() as patched:
            patched.setattr("serving.router.service.retry_after_audit", stuck)
            asked = asyncio.create_task(client.generate("x", mode="local", max_bytes=10))
            assert await asyncio.to_thread(written.wait, 30)
        asked.cancel()
        message = ""
        while "6 are left" not in message:
            with pytest.raises(RouterError) as caught:
                await client.generate("x", mode="local", max_bytes=8)
            message = str(caught.value)


def test_a_client_checks_the_certificate_of_the_router(served: Served, new_pki: NewPki) -> None:
    foreign = Tls(new_pki("other").authority.directory / "ca.pem")
    says = f"the router at {served.address} presented a certificate from another authority than --tls-ca"
    with served.client(tls=foreign) as client, refused(grpc.StatusCode.UNAVAILABLE, says):
        ask(client)
    with Client(served.address) as client, pytest.raises(RouterError, match="it speaks TLS: give --tls-ca"):
        ask(client)
    with served.client(tls=served.pki.issue(CLIENT, "alice")) as client:
        assert ask(client) == 4, "a client may have a certificate, and needs none"


async def test_a_renewed_authority_ends_no_request_and_opens_one_connection(served: Served, tmp_path: Path) -> None:
    mine, whole, nothing = tmp_path / "mine.pem", served.ca.authority.read_bytes(), grpc.aio.Metadata()
    mine.write_bytes(whole)
    lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "lost")
    async with AsyncClient(served.address, tls=Tls(mine), token=served.tokens["alice"]) as client:
        pieces = client.stream("x", mode="local", max_bytes=400)
        await anext(pieces)
        mine.write_bytes(whole[:50])
        client.failed(lost, 0, 1.0)
        assert len(client._channels) == 1, "half an authority is not taken"
        mine.write_bytes(whole + b"\n")
        for _ in range(3):
            client.failed(lost, 0, 1.0)
        assert len(client._channels) == 2
        *_, last = [piece async for piece in pieces]
        assert isinstance(last, Result)
        assert last.output_bytes == 400
        assert (await client.generate("x", mode="local", max_bytes=4)).output_bytes == 4


def test_a_token_is_read_from_a_file_or_the_environment(
    served: Served, onesweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, path = served.tokens["alice"], tmp_path / "token"
    where = ("--router", served.address, "--tls-ca", served.ca.authority, "--mode", "local", "--max-bytes", 4)
    where = (*where, "--wait", 0)  # its one host never comes
    assert onesweep("generate", "x", *where)[0] == 2
    path.write_text(f"{token}\n")
    path.chmod(0o600)
    assert onesweep("generate", "x", *where, "--token-file", path)[0] == 0
    monkeypatch.setenv("ONESWEEP_TOKEN", token)
    assert onesweep("generate", "x", *where)[0] == 0


# Options that would expose a secret or open a server


TOPOLOGY = """
[router]
listen = "127.0.0.1:0"
[[hosts]]
name = "paris"
address = "10.8.0.1:7701"
blocks = [0, 1, 2]
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["router"], "10.8.0.1:7701 is on another machine and traffic would not be encrypted"),
        (["doctor"], "10.8.0.1:7701 is on another machine"),
        (["router", "--listen", "0.0.0.0:0"], "anybody could send requests: give --tokens"),
        (["router", "--listen", "0.0.0.0:0", "--insecure"], "or allow it with --anybody"),
        (["router", "--listen", "0.0.0.0:0", "--anybody"], "traffic is not encrypted: give --tls-cert"),
        (["router", "--listen", "0.0.0.0:0", "--tokens", "TOKENS"], "traffic is not encrypted: give --tls-cert"),
        (["router", "--tokens", "/nowhere"], "cannot read /nowhere: No such file"),
        (["router", "--tls-cert", "a.pem"], "--tls-cert and --tls-key need --tls-ca"),
        (["router", "--tls-ca", "CA"], "a server needs a certificate: give --tls-cert and --tls-key"),
        (["host", "paris", "--tls-ca", "CA", "--tls-cert", "ALICE.pem", "--tls-key", "ALICE.key"], "is for onesweep:"),
    ],
)
def test_a_wrong_option_is_explained(
    bundles: Path, new_pki: NewPki, onesweep: Run, tmp_path: Path, arguments: list[str], says: str
) -> None:
    topology = tmp_path / "topology.toml"
    topology.write_text(f'checkpoint = "{bundles / "own"}"\n{TOPOLOGY}')
    write_tokens(tmp_path / "tokens.toml", [])
    alice = new_pki("certs").issue(CLIENT, "alice")
    files = {"TOKENS": tmp_path / "tokens.toml", "CA": alice.authority}
    files |= {"ALICE.pem": alice.certificate, "ALICE.key": alice.key}
    code, _, err = onesweep(*[files.get(word, word) for word in arguments], "--topology", topology)
    assert (code, says in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--token-file", "/nowhere"], "cannot read /nowhere"),
        (["--token-file", "OPEN"], "is a secret, but others can read"),
        (["--token-file", "EMPTY"], "is empty: it must hold a token"),
        (["--router", "10.8.0.1:1"], "is on another machine and traffic would not be encrypted: give --tls-ca, or"),
        (
            ["--router", "10.8.0.1:1", "--insecure", "--token-file", "TOKEN"],
            "a token is not sent to 10.8.0.1:1 in plain text",
        ),
        (["--router", "127.0.0.1:1,127.0.0.1:1"], "each once"),
    ],
)
def test_a_wrong_client_option_is_explained(onesweep: Run, tmp_path: Path, arguments: list[str], says: str) -> None:
    files = {name: tmp_path / name for name in ("OPEN", "EMPTY", "TOKEN")}
    for name, path in files.items():
        path.write_text("x" if name == "TOKEN" else "")
        path.chmod(0o644 if name == "OPEN" else 0o600)
    for command in (["status"], ["generate", "x"]):
        code, _, err = onesweep(*command, "--router", "127.0.0.1:1", *[files.get(word, word) for word in arguments])
        assert (code, says in err) == (2, True), err


def test_a_topology_names_the_certificates(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(f'[tls]\ndirectory = "keys"\n{TOPOLOGY}')
    topology = read_topology(path)
    keys = tmp_path / "keys"
    assert topology.tls_of("paris") == Tls(keys / "ca.pem", keys / "paris.pem", keys / "paris.key")
    assert topology.client_tls == Tls(keys / "ca.pem")
    path.write_text(topology.to_toml())
    assert read_topology(path) == topology
    path.write_text(f"[tls]\ncolour = 1\n{TOPOLOGY}")
    with pytest.raises(InputError, match=r"\[tls\] has an unknown key 'colour'"):
        read_topology(path)


def test_a_gateway_refuses_an_expired_certificate(new_pki: NewPki) -> None:
    pki = new_pki("own")
    valid, expired = pki.issue(ROUTER, "r"), pki.expire(pki.issue(ROUTER, "old"))
    der = ssl.PEM_cert_to_DER_cert(valid.certificate.read_text())
    authority = pki.expire(Tls(valid.authority, valid.authority, valid.key)).certificate
    valid.certificate.write_bytes(valid.certificate.read_bytes() + authority.read_bytes())
    OwnCertificate(valid.certificate, valid.key)  # clients may know a newer authority
    valid.certificate.write_text(ssl.DER_cert_to_PEM_cert(der.replace(b"\xa0\3\2\1\2", b"\xa0\3\2\1\3")))  # version 4
    OwnCertificate(valid.certificate, valid.key)  # only OpenSSL reads it
    with pytest.raises(InputError, match=r"old\.pem has expired: renew it"):
        OwnCertificate(expired.certificate, expired.key)
