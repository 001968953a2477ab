"""Rings of two hosts for every block, of which one is lost in the middle of a request; and an etcd."""

import contextlib
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client
from stages.host.host import Host
from stages.v1 import stage_pb2
from stages.wire.messages import copy_of
from stages.wire.status import StatusError
from tests.conftest import PATIENCE_S, until, wait_ready
from tests.serving.releases import doubled


@pytest.fixture(scope="module")
def pairs(bundles: Path, module_servers: Any) -> Iterator[tuple[Client, Client]]:
    """Routers over two hosts for every block, the second of which audits every sweep."""
    bundle = bundles / "scored"
    topology = doubled(bundle)
    other = replace(topology, router=f"127.0.0.1:{free_port_block(1)}")
    module_servers.hosts(topology, bundle)
    module_servers.router(topology, bundle, ring={"hop_timeout_s": 10.0})
    module_servers.router(other, bundle, ring={"hop_timeout_s": 10.0, "audit_share": 1.0})
    for each in (topology, other):
        wait_ready(each.router)
    with Client(topology.router) as plain, Client(other.router) as audited:
        yield plain, audited


@dataclass
class Loss:
    """A host that accepts no more hops, and the hops that all hosts accepted."""

    lost: str = ""
    hops: dict[str, list[stage_pb2.Hop]] = field(default_factory=lambda: defaultdict(list))

    @property
    def before(self) -> list[list[stage_pb2.Hop]]:
        """Hops that it had accepted, by attempt: a machine that stalls may cost more attempts than the loss does."""
        return self._tries(self.lost)

    @property
    def instead(self) -> list[list[stage_pb2.Hop]]:
        """Hops that the other host of its pair accepted, by attempt."""
        pair, number = self.lost.split("-")
        return self._tries(f"{pair}-{3 - int(number)}")

    def _tries(self, host: str) -> list[list[stage_pb2.Hop]]:
        tries = defaultdict[str, list[stage_pb2.Hop]](list)
        for hop in self.hops[host]:
            tries[hop.session].append(hop)
        return list(tries.values())


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loss]:
    """Have the first host of a pair that is sent a certain hop take none from then on. `pair`: begins their names."""

    def at(
        pair: str, is_due: Callable[[stage_pb2.Hop], bool], code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    ) -> Loss:
        loss, accept = Loss(), Host.accept

        def looked_at(host: Host, hop: stage_pb2.Hop, received_bytes: int, sender: str = "") -> Any:
            name = host.settings.name
            if name == loss.lost or (not loss.lost and name.startswith(pair) and is_due(hop)):
                loss.lost = name
                raise StatusError(code, "gone", 100)
            loss.hops[name].append(copy_of(hop))
            return accept(host, hop, received_bytes, sender)

        monkeypatch.setattr(Host, "accept", looked_at)
        return loss

    return at


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], bool]], None]:
    """`lying(host, lies)`: this host forwards wrong hidden states whenever `lies()` is true."""

    def start(liar: str, lies: Callable[[], bool]) -> None:
        go_on = Host._continue

        def lie(host: Host, job: Any, outcome: Any) -> None:
            is_state = isinstance(outcome, stage_pb2.Hop) and outcome.read.hidden
            if is_state and host.settings.name == liar and lies():
                outcome.read.hidden = np.negative(np.frombuffer(outcome.read.hidden, "<f4")).tobytes()
            go_on(host, job, outcome)

        monkeypatch.setattr(Host, "_continue", lie)

    return start


# A real etcd


class Etcd:
    """An etcd process on loopback, in a directory of its own."""

    KEY = "/onesweep/topology"

    def __init__(self, directory: Path, options: tuple[str, ...] = (), tls: dict[str, Path] | None = None) -> None:
        """:param tls: ca, cert and key, as `--topology` calls them: of etcd, and of who waits for it."""
        self.directory, self.options, self.tls = directory, options, tls or {}
        self.port = free_port_block(2)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}{self.KEY}"

    def start(self) -> None:
        """Returns when it answers."""
        scheme = "https" if self.tls else "http"
        client, peer = (f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.port + 1}")
        names = {"ca": "trusted-ca-file", "cert": "cert-file", "key": "key-file"}
        self.directory.mkdir(exist_ok=True)
        command = [
            *("etcd", "--data-dir", str(self.directory / "data"), "--unsafe-no-fsync"),
            *("--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", *self.options),
            *(f"--{names[kind]}={path}" for kind, path in self.tls.items()),
        ]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self.answers)

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.directory / "log").read_text()
        from etcd3gw.exceptions import Etcd3Exception

        try:
            return bool(self._client().status())
        except Etcd3Exception:
            return False

    def put(self, topology: str) -> None:
        self._client().put(self.KEY, topology)

    def _client(self) -> Any:
        from etcd3gw.client import Etcd3Client

        files = [str(self.tls[kind]) if self.tls else None for kind in ("ca", "key", "cert")]
        client = Etcd3Client("127.0.0.1", self.port, "https" if self.tls else "http", *files, api_path="/v3/")
        client.session.trust_env = False
        return client

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            self.process = None


@contextlib.contextmanager
def open_etcd(directory: Path, *options: str, tls: dict[str, Path] | None = None) -> Iterator[Etcd]:
    pytest.importorskip("etcd3gw", reason="etcd3gw is not installed: pip install 'onesweep[etcd]'")
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    etcd = Etcd(directory, options, tls)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.kill()


@pytest.fixture
def etcd_with(tmp_path: Path) -> Callable[..., Any]:
    """`with etcd_with(*options) as etcd`: one of the test's own."""
    return lambda *options, **how: open_etcd(tmp_path / "etcd", *options, **how)
