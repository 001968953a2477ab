"""A topology in a real etcd, whatever becomes of it; and what answers in its place."""

import contextlib
import http.server
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.router import etcd as etcd_module
from serving.router import topology_source
from serving.router.etcd import EtcdTopology
from serving.router.topology import local_topology
from serving.router.topology_source import follow_topology
from stages.errors import ConfigError, ServiceError
from stages.wire.auth import HOST
from stages.wire.tls import Tls
from tests.conftest import PATIENCE_S, eventually, jobs

WHOLE, PAIR = (local_topology(hosts, 3, Path("/weights")) for hosts in (1, 2))


async def test_the_topology_is_followed_through_an_outage(
    etcd_with: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology_source, "FOLLOW_S", 0.01)
    caplog.set_level(logging.INFO)
    heard = []
    with etcd_with() as etcd:
        source = EtcdTopology(etcd.url.replace("etcd://", "etcd://127.0.0.1:1,"))  # a member that is down
        with pytest.raises(ServiceError, match="has no key /onesweep/topology: `etcdctl put /onesweep/topology < "):
            source.read()
        etcd.put("hosts = []")
        with pytest.raises(ConfigError, match=f"^{source}: a topology must have 1 to 64 hosts, not 0"):
            source.read()
        etcd.put(WHOLE.to_toml())
        assert source.read() == WHOLE
        async with jobs(follow_topology(source, WHOLE, heard.append)):
            etcd.kill()
            await eventually(lambda: "no etcd answers at" in caplog.text)
            etcd.start()
            await eventually(lambda: "can be read again" in caplog.text)
            assert heard == []
            etcd.put("hosts = []")
            await eventually(lambda: "not 0" in caplog.text)
            etcd.put(PAIR.to_toml())
            await eventually(lambda: heard == [PAIR])
    assert len([line for line in caplog.messages if "stay unchanged" in line]) == 2


def test_a_client_certificate_is_required(new_pki: Callable[[str], Any], etcd_with: Callable[..., Any]) -> None:
    # etcd's gateway is a client of its own server, with the server's certificate
    own, other = new_pki("own"), new_pki("other")
    server, paris, stranger = own.issue(HOST, "etcd"), own.issue(HOST, "paris"), other.issue(HOST, "stranger")

    def read(ca: Path, shown: Tls | None) -> None:
        pair = f"&cert={shown.certificate}&key={shown.key}" if shown else ""
        EtcdTopology(f"{etcd.url}?ca={ca}{pair}").read()

    files = {"ca": server.authority, "cert": server.certificate, "key": server.key}
    with etcd_with("--client-cert-auth", tls=files) as etcd:
        etcd.put(WHOLE.to_toml())
        read(server.authority, paris)
        for shown in (stranger, None):
            with pytest.raises(ServiceError, match="no etcd answers"):
                read(server.authority, shown)
        with pytest.raises(ServiceError, match="CERTIFICATE_VERIFY_FAILED"):
            read(stranger.authority, paris)


# Servers that are no etcd


@contextlib.contextmanager
def answering(status: int, body: Iterable[bytes], length: int) -> Iterator[int]:
    """A server that sends the same to every client; its port."""

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


def read(port: int) -> str:
    with pytest.raises(ServiceError, match="no etcd answers") as caught:
        EtcdTopology(f"etcd://127.0.0.1:{port}/onesweep").read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "length"),
    [
        (200, b"[" * 100_000, 100_000),
        (200, b'{"header"', 1000),
        (200, b"{}", 2),
        (200, b'{"result": []}', 14),
        (200, b'{"header": {}, "kvs": 1}', 24),
        (503, b"unav", 1000),
    ],
    ids=["deep", "cut", "other", "odd", "wrong", "busy"],
)
def test_an_invalid_answer_is_reported(status: int, body: bytes, length: int) -> None:
    with answering(status, [body], length) as port:
        assert "does not answer as etcd 3.4 or newer does" in read(port)


@pytest.mark.parametrize(("limit", "value"), [("MAX_ANSWER_BYTES", 1 << 20), ("ANSWER_S", 0.05)])
def test_an_endless_answer_is_cut_off(limit: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ANSWER_BYTES", "ANSWER_S"):
        monkeypatch.setattr(etcd_module, name, value if name == limit else 1 << 40)
    with answering(200, itertools.repeat(b" " * 4096), 1 << 40) as port:
        assert "an answer of more than" in read(port)
