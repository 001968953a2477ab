"""A router that machines have joined, and the machines, over real sockets and TLS."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.v1 import join_pb2, join_pb2_grpc
from stages.wire.certificates import make_request
from stages.wire.channel import LINKS_VARIABLE, HealthChecks, bind, new_server, open_channel
from stages.wire.links import ROUTER_NAME, LinkProxy, MachineLinks, link_address, link_name
from stages.wire.messages import PROTOCOL
from stages.wire.pipes import SocketPipe
from stages.wire.rendezvous import Rendezvous, RunDirectory
from stages.wire.tls import Security, Tls
from stages.wire.tokens import token_metadata
from tests.conftest import PATIENCE_S, eventually


@dataclass
class Run:
    """A rendezvous, and machines that are there by name."""

    rendezvous: Rendezvous
    address: str
    lines: list[str]
    machines: dict[str, MachineLinks]

    def stub(self, secret: str) -> tuple[grpc.aio.Channel, "join_pb2_grpc.JoinServiceAsyncStub"]:
        authority = Security(Tls(self.rendezvous.run.tls.authority))
        name = (("grpc.ssl_target_name_override", link_name(ROUTER_NAME)),)
        channel = open_channel(self.address, security=authority, options=name, metadata=token_metadata(secret))
        return channel, join_pb2_grpc.JoinServiceStub(channel)

    async def enrol(self, directory: Path, secret: str, name: str, **fields: int) -> join_pb2.EnrolResponse:
        directory.mkdir(mode=0o700, exist_ok=True)
        request = make_request(directory / "machine.key", name)
        asked = join_pb2.EnrolRequest(name=name, request=request, protocol=PROTOCOL, unix_s=int(time.time()))
        for field, value in fields.items():
            setattr(asked, field, value)
        channel, stub = self.stub(secret)
        async with channel:
            return await stub.Enrol(asked, timeout=PATIENCE_S)


@asynccontextmanager
async def running(directory: Path, **reports: bool) -> AsyncIterator[Run]:
    """A run with machines. reports: whether each, by name, reports its addresses."""
    lines: list[str] = []
    rendezvous = Rendezvous(RunDirectory(directory / "run"), lines.append)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(rendezvous.serving("127.0.0.1:0"))
        run = Run(rendezvous, f"127.0.0.1:{port}", lines, {})
        for name, is_reporting in reports.items():
            run.machines[name] = await stack.enter_async_context(attending(run, directory / name, name, is_reporting))
        yield run


@asynccontextmanager
async def attending(run: Run, directory: Path, name: str, is_reporting: bool) -> AsyncIterator[MachineLinks]:
    _, secret = run.rendezvous.run.invitations.add(1, 1)
    joined = await run.enrol(directory, secret, name)
    (directory / "ca.pem").write_bytes(joined.authority)
    (directory / "machine.pem").write_bytes(joined.certificate)
    tls = Tls(directory / "ca.pem", directory / "machine.pem", directory / "machine.key")
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthChecks(), server)
    port = bind(server, "127.0.0.1:0", Security(tls), mutual=True)
    addresses = [f"127.0.0.1:{port}"] if is_reporting else []
    links = MachineLinks(name, tls, [run.address], joined.secret, ("127.0.0.1", port), lambda: addresses)
    join_pb2_grpc.add_JoinServiceServicer_to_server(links.awaited, server)
    await server.start()
    attend = asyncio.create_task(links.attend())
    await eventually(lambda: links.attends)
    yield links
    attend.cancel()
    await links.close()
    await server.stop(None)


async def reach(dial: Callable[[str, SocketPipe], Awaitable[None]], name: str, tls: Tls) -> int:
    """The status of a machine's server, over the proxy."""
    proxy = await LinkProxy(dial).open()
    async with proxy, open_channel(link_address(name), security=Security(tls)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)).status


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of another test's, an environment that would rule out ours, and patience on a busy machine."""
    monkeypatch.setenv("no_grpc_proxy", "onesweep,127.0.0.1")
    monkeypatch.setenv(LINKS_VARIABLE, "")
    for limit in ("links.PROBE_S", "links.REVERSE_S", "links.NOTICE_S", "rendezvous.NOTICE_S"):
        monkeypatch.setattr(f"stages.wire.{limit}", PATIENCE_S)
