"""The deployment that is fuzzed: real processes on loopback, with limits so small that their bounds are met."""

import asyncio
import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from onesweep.loadtest.faults.process import Program
from onesweep.loadtest.fuzz.base import TargetTally
from onesweep.loadtest.workload.testbed import block_count
from onesweep.serving.cli.deployment import MODULE, Deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.client.client import Client, RouterError
from onesweep.serving.router.topology import HostEntry, Topology, local_topology
from onesweep.serving.v1 import router_pb2
from onesweep.stages.errors import ServiceError
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.channel import MOST_CONNECTIONS, new_server

MESSAGE_BYTES = 64 << 20
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]

# Gets a method's name and a message; returns the one that is passed on instead of it.
Hook = Callable[[str, bytes], bytes]


def unchanged(method: str, data: bytes) -> bytes:
    return data


class Interposer:
    """A server in the middle: passes raw messages on to another one, and lets hooks see or change them."""

    def __init__(self, service: ServiceDescriptor, listen: str, target: str) -> None:
        self.on_request: Hook = unchanged
        self.on_answer: Hook = unchanged
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._server = new_server(MESSAGE_BYTES)
        handlers = {method.name: self._handler(service.full_name, method) for method in service.methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        self._server.add_insecure_port(listen)

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def _handler(self, service: str, method: MethodDescriptor) -> Any:  # noqa: ANN401
        path, name = f"/{service}/{method.name}", method.name

        async def requests(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for message in messages:
                yield self.on_request(name, message)

        async def answers(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
            metadata = tuple(pair for pair in context.invocation_metadata() if pair[0] == "authorization")
            make: Any = self._channel.stream_stream(path)
            call = make(requests(messages), timeout=context.time_remaining(), metadata=metadata)
            try:
                async for answer in call:
                    yield self.on_answer(name, answer)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()

        # a single message is a stream of one on the wire: nobody at either end sees a difference
        return grpc.stream_stream_rpc_method_handler(answers)


HOSTS = 2
QUEUE = 32  # hops: one batch of a target fills it
LEASE_S = 10.0  # short, so that sessions which nobody released end within the run
LIMITS = ("--session-mb", "48", "--queue", str(QUEUE), "--lease-s", f"{LEASE_S:g}")
ROUTER_LIMITS = ("--max-requests", "32", "--max-waiting", "16")
READY_S = 120.0  # two hosts, two routers and a gateway start at once
STOP_S = 15.0
STAGE = stage_pb2.DESCRIPTOR.services_by_name["StageService"]
ROUTER = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
DECEIVED = "deceived"  # the router that reaches its hosts over interposers only


@dataclass
class FuzzTestbed:
    """Addresses, and the processes that listen there."""

    checkpoint: Path
    directory: Path
    deployment: Deployment
    gateway: str
    deceived: str  # address of a second router, whose every link and every link between its hosts passes an interposer
    between: list[Interposer]  # one before each host
    before_router: Interposer
    posing: str  # its address
    extra: dict[str, Program] = field(default_factory=dict)  # more processes, whose logs are watched, too

    @property
    def router(self) -> str:
        return self.deployment.topology.router

    @property
    def hosts(self) -> list[str]:
        return [host.listen for host in self.deployment.topology.hosts]

    def processes(self) -> dict[str, psutil.Process | None]:
        """By name; None for one that ended."""
        pids = self.deployment.processes | {name: program.pid for name, program in self.extra.items()}
        found: dict[str, psutil.Process | None] = dict.fromkeys(pids)
        for name, pid in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid is None:
                    continue
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[name] = process
        return found

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def spawn(self, name: str, *arguments: str) -> None:
        program = self.extra[name] = Program(name, [sys.executable, *MODULE, *arguments], self.log(name))
        program.start()


@contextlib.asynccontextmanager
async def open_fuzz_testbed(checkpoint: Path) -> AsyncIterator[FuzzTestbed]:
    """A deployment with a gateway, and a second router behind interposers; ready. Raises OnesweepError."""
    port = free_port_block(2 * HOSTS + 4)
    topology = local_topology(HOSTS, block_count(checkpoint), checkpoint, port + 1)
    gateway, deceived, posing = (f"127.0.0.1:{port + HOSTS + n}" for n in (1, 2, 3))
    veiled = [f"127.0.0.1:{port + HOSTS + 4 + n}" for n in range(HOSTS)]
    directory = Path(tempfile.mkdtemp(prefix="onesweep-fuzz-"))
    directory.chmod(0o700)
    between = [Interposer(STAGE, veil, host.listen) for veil, host in zip(veiled, topology.hosts, strict=True)]
    before_router = Interposer(ROUTER, posing, topology.router)
    # every host may be followed by any: it finds out itself which of them fit
    after = ",".join([host.address for host in topology.hosts] + veiled)
    options = {"host_options": (*LIMITS, "--next", after), "router_options": ROUTER_LIMITS, "http": gateway}
    deployment = await asyncio.to_thread(Deployment.start, topology, checkpoint, directory, **options)  # type: ignore[arg-type]
    testbed = FuzzTestbed(checkpoint, directory, deployment, gateway, deceived, between, before_router, posing)
    try:
        for interposer in (*between, before_router):
            await interposer.start()
        entries = [HostEntry(h.name, veil, h.blocks, veil) for h, veil in zip(topology.hosts, veiled, strict=True)]
        path = directory / f"{DECEIVED}.toml"
        path.write_text(Topology(tuple(entries), deceived, checkpoint).to_toml(), encoding="utf-8")
        testbed.spawn(DECEIVED, "router", "--topology", str(path), "--checkpoint", str(checkpoint), "--threads", "1")
        await asyncio.to_thread(deployment.wait_ready)
        await asyncio.to_thread(deployment.wait_listening, gateway, READY_S)
        await asyncio.to_thread(wait_ready, deceived)
        yield testbed
    finally:
        # first what asks, then what answers: a router that loses its hosts would log that
        for program in testbed.extra.values():
            program.stop(STOP_S)
        await asyncio.to_thread(deployment.stop)
        for interposer in (*between, before_router):
            await interposer.close()
        shutil.rmtree(directory, ignore_errors=True)


def wait_ready(router: str, within_s: float = READY_S) -> None:
    """Return when a router can serve. Raises ServiceError."""
    deadline = time.monotonic() + within_s
    with Client(router) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(RouterError):
                if client.status(2.0).ready:
                    return
            time.sleep(0.1)
    raise ServiceError(f"the router at {router} is not ready after {within_s:g} s")


# Above what any process may hold: the weights, KV caches up to the limit, and a full queue of the largest messages.
RSS_MOST_MB = 1500.0
DESCRIPTORS_MOST = MOST_CONNECTIONS + 200
# In a log: the server did not expect this. A numpy warning is how wrong numbers first show.
TROUBLE = re.compile(
    rb"Traceback|Unexpected \[|Exception|Warning: |never retrieved|Segmentation|Fatal|assert", re.IGNORECASE
)
EXCERPT_BYTES = 3000


@dataclass
class ProcessWatch:
    """Checks that processes live, stay within their bounds and log nothing but refusals.

    A finding is booked for the target whose batch came before.
    """

    testbed: FuzzTestbed
    rss_mb: dict[str, float] = field(default_factory=dict)  # the most that was seen, by process
    descriptors: dict[str, int] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)

    def look(self, tally: TargetTally) -> None:
        for name, process in self.testbed.processes().items():
            if process is None:
                if name not in self._gone:
                    self._gone.add(name)
                    tally.finding(f"{name} ended: {self.testbed.log(name).read_text(errors='replace')[-500:]}")
                continue
            try:
                rss_mb, descriptors = process.memory_info().rss / 1e6, process.num_fds()
            except psutil.NoSuchProcess:
                continue
            self.rss_mb[name] = max(self.rss_mb.get(name, 0.0), rss_mb)
            self.descriptors[name] = max(self.descriptors.get(name, 0), descriptors)
            if rss_mb > RSS_MOST_MB:
                tally.finding(f"{name} holds over {RSS_MOST_MB:g} MB")
            if descriptors > DESCRIPTORS_MOST:
                tally.finding(f"{name} holds over {DESCRIPTORS_MOST} descriptors")
            self._read_log(name, tally)

    def _read_log(self, name: str, tally: TargetTally) -> None:
        with self.testbed.log(name).open("rb") as log:
            log.seek(self._read.get(name, 0))
            fresh = log.read()
            self._read[name] = log.tell()
        if (found := TROUBLE.search(fresh)) is not None:
            begin = max(fresh.rfind(b"\n", 0, found.start()) - 200, 0)
            excerpt = fresh[begin : begin + EXCERPT_BYTES].decode(errors="replace")
            last = re.findall(r"^\S*(?:Error|Exception|Warning)[:\s].*$", excerpt, re.MULTILINE)
            what = re.sub(r"\d+", "0", last[0] if last else excerpt[:200])
            tally.finding(f"{name} logs: {what[:200]}", excerpt.encode())
