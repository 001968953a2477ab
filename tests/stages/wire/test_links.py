"""Joined machines reach each other by each kind of link, over real sockets and TLS; strangers do not."""

import asyncio
import base64
import contextlib
import gc
import os
import secrets
import socket
import time
import tracemalloc
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
from stages.wire.link_quality import LinkRecord
from stages.wire.links import BETWEEN_S, ROUTER_NAME, TO_KEY, LinkProxy, MachineLinks, link_address, link_name
from stages.wire.messages import PROTOCOL
from stages.wire.pipes import PIECE_BYTES, PIPE_BYTES, PIPE_KEY, SocketPipe
from stages.wire.rendezvous import Rendezvous, RunDirectory
from stages.wire.status import StatusError
from stages.wire.tls import Security, Tls
from stages.wire.tokens import token_metadata
from tests.conftest import PATIENCE_S, eventually

GUESSES = 10_000
LEAST_HELD = 4 << 20  # of a connection that goes over a relay, in kernels and machines that read at once
Dial = Callable[[str, SocketPipe], Awaitable[None]]


@dataclass
class Run:
    """A rendezvous, and machines that are there by name."""

    rendezvous: Rendezvous
    address: str
    said: list[str]
    machines: dict[str, MachineLinks]

    def stub(self, secret: str) -> tuple[grpc.aio.Channel, "join_pb2_grpc.JoinServiceAsyncStub"]:
        authority = Security(Tls(self.rendezvous.run.tls.authority))
        name = (("grpc.ssl_target_name_override", link_name(ROUTER_NAME)),)
        channel = open_channel(self.address, security=authority, options=name, metadata=token_metadata(secret))
        return channel, join_pb2_grpc.JoinServiceStub(channel)

    async def enrol(self, directory: Path, secret: str, name: str, **told: int) -> join_pb2.EnrolResponse:
        directory.mkdir(mode=0o700, exist_ok=True)
        request = make_request(directory / "machine.key", name)
        asked = join_pb2.EnrolRequest(name=name, request=request, protocol=PROTOCOL, unix_s=int(time.time()))
        for field, value in told.items():
            setattr(asked, field, value)
        channel, stub = self.stub(secret)
        async with channel:
            return await stub.Enrol(asked, timeout=PATIENCE_S)


@asynccontextmanager
async def running(directory: Path, **told: bool) -> AsyncIterator[Run]:
    """A run with machines. told: of each by name, whether it tells where it can be dialled."""
    said: list[str] = []
    rendezvous = Rendezvous(RunDirectory(directory / "run"), said.append)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(rendezvous.serving("127.0.0.1:0"))
        run = Run(rendezvous, f"127.0.0.1:{port}", said, {})
        for name, tells in told.items():
            run.machines[name] = await stack.enter_async_context(attending(run, directory / name, name, tells))
        yield run


@asynccontextmanager
async def attending(run: Run, directory: Path, name: str, tells: bool) -> AsyncIterator[MachineLinks]:
    _, secret = run.rendezvous.run.invitations.add(1, 1)
    joined = await run.enrol(directory, secret, name)
    (directory / "ca.pem").write_bytes(joined.authority)
    (directory / "machine.pem").write_bytes(joined.certificate)
    tls = Tls(directory / "ca.pem", directory / "machine.pem", directory / "machine.key")
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthChecks(), server)
    port = bind(server, "127.0.0.1:0", Security(tls), mutual=True)
    told = [f"127.0.0.1:{port}"] if tells else []
    links = MachineLinks(name, tls, [run.address], joined.secret, ("127.0.0.1", port), lambda: told)
    join_pb2_grpc.add_JoinServiceServicer_to_server(links.awaited, server)
    await server.start()
    attend = asyncio.create_task(links.attend())
    await eventually(lambda: links.attends)
    yield links
    attend.cancel()
    await links.close()
    await server.stop(None)


async def reach(dial: Dial, name: str, tls: Tls) -> int:
    """The status of a machine's server, over the proxy."""
    proxy = await LinkProxy(dial).open()
    async with proxy, open_channel(link_address(name), security=Security(tls)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)).status


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of another test's, and patience on a busy machine."""
    monkeypatch.setenv(LINKS_VARIABLE, "")
    for limit in ("links.PROBE_S", "links.REVERSE_S", "links.NOTICE_S", "rendezvous.NOTICE_S"):
        monkeypatch.setattr(f"stages.wire.{limit}", PATIENCE_S)


def test_each_kind_of_link_reaches_its_machine(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, a=True, b=True, c=False, d=False) as run:
            run.rendezvous.neighbours = {"a": {"b", "c"}, "c": {"d"}}
            own = run.rendezvous.run
            assert await reach(run.rendezvous.dial, "c", own.tls) == 1
            for here, there, kind in (("a", "b", "direct"), ("a", "c", "reversed"), ("c", "d", "relayed")):
                links = run.machines[here]
                assert await reach(links.dial, there, links.tls) == 1
                line = f"link {here} to {there}: {kind}"
                await eventually(lambda line=line: line in run.said)
            record = LinkRecord.read(run.rendezvous.run.directory)
            assert record.kinds == {("a", "b"): "direct", ("a", "c"): "reversed", ("c", "d"): "relayed"}

    asyncio.run(main())


def test_a_machine_reaches_only_its_neighbours(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, a=True, b=True) as run:
            links = run.machines["a"]
            with pytest.raises(grpc.aio.AioRpcError, match="503"):
                await reach(links.dial, "b", links.tls)
            assert run.rendezvous.refused["Reach"] > 0
            run.rendezvous.neighbours = {"a": {"b"}}
            channel, stub = run.stub("")  # a stranger
            async with channel:
                for call in (stub.Reach(join_pb2.ReachRequest(to="b")), stub.Carry(metadata=((TO_KEY, "b"),)).read()):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


class Flood:
    """One end of a pipe: its bytes have no end, and their reader may be slow."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def read(self) -> bytes:
        self.sent_bytes += PIECE_BYTES
        return bytes(PIECE_BYTES)

    async def write(self, data: bytes) -> None:
        assert not data

    async def end(self) -> None:
        pass


def test_a_slow_reader_makes_the_writer_wait_and_the_relay_holds_no_more_than_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_held = 0

    async def main() -> None:
        nonlocal most_held
        async with running(tmp_path, a=False, b=False) as run:
            read, may_read = 0, asyncio.Semaphore(0)
            flood, budget = Flood(), run.rendezvous.budget

            async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal read, most_held
                while True:
                    await may_read.acquire()
                    read += len(await reader.readexactly(PIECE_BYTES))
                    most_held = max(most_held, flood.sent_bytes - read)

            server = await asyncio.start_server(slow, "127.0.0.1", 0, limit=PIECE_BYTES)
            server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
            run.machines["b"].own = server.sockets[0].getsockname()[:2]
            run.rendezvous.neighbours = {"a": {"b"}, "b": {"a"}}
            flow = asyncio.create_task(run.machines["a"].dial("b", flood))
            pair = frozenset("ab")
            while read < 4 * LEAST_HELD:
                may_read.release()
                await asyncio.sleep(0)
            assert most_held < 2 * LEAST_HELD
            assert budget.held[pair] == PIPE_BYTES
            assert LEAST_HELD < budget.carried[pair] <= flood.sent_bytes
            monkeypatch.setattr("stages.wire.pipes.PAIR_BYTES", PIPE_BYTES)
            with pytest.raises(StatusError, match="may hold no more than 2 MB for b and a"):
                await run.machines["b"].dial("a", Flood())
            monkeypatch.setattr("stages.wire.pipes.RELAY_BYTES", PIPE_BYTES)
            with pytest.raises(StatusError, match="may hold no more than 2 MB for router and a"):
                await run.rendezvous.dial("a", Flood())
            flow.cancel()
            await asyncio.gather(flow, return_exceptions=True)
            await eventually(lambda: budget.held.total() == 0)
            server.close()

    asyncio.run(main())


def test_nobody_opens_a_pipe_that_is_not_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, a=True, b=True) as run:
            links = run.machines["a"]
            channel, stub = run.stub(links._secret)
            async with channel:
                for pipe in ("", "0" * 32):
                    with pytest.raises(grpc.aio.AioRpcError, match="nobody waits for this pipe"):
                        await stub.Carry(metadata=((PIPE_KEY, pipe), *token_metadata(links._secret))).read()

    asyncio.run(main())


def test_a_ticket_lets_in_once_and_says_why_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as run:
            invitations = run.rendezvous.run.invitations
            _, secret = invitations.add(1, 1)

            async def refused(secret: str, name: str, **told: int) -> str:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await run.enrol(tmp_path / "m", secret, name, **told)
                return f"{error.value.code().name}: {error.value.details()}"

            assert "clock is 1440 minutes ahead of the router's" in await refused(
                secret, "m", unix_s=int(time.time()) + 86400
            )
            assert (await refused(secret, "m", protocol=PROTOCOL - 1)).startswith("FAILED_PRECONDITION")
            assert "small letters, digits and dashes" in await refused(secret, "../m")
            assert "ALREADY_EXISTS: a machine called router" in await refused(secret, "router")
            joined = await run.enrol(tmp_path / "m", secret, "m")
            assert "UNAUTHENTICATED: this ticket was used already" in await refused(secret, "n")
            assert "the router knows no such ticket" in await refused("guess", "n")
            assert "the router knows no such ticket" in await refused("", "n")
            _, second = invitations.add(1, 1)
            assert "ALREADY_EXISTS: a machine called m" in await refused(second, "m")
            revoked, third = invitations.add(1, 1, "n")
            invitations.revoke(revoked.id)
            assert "this ticket was revoked" in await refused(third, "n")
            # its own secret brings a new certificate, and another start of the router knows it still
            again = Rendezvous(RunDirectory(tmp_path / "run"))
            assert list(again.machines) == ["m"]
            renewed = await run.enrol(tmp_path / "m", joined.secret, "m")
            assert (renewed.secret, renewed.authority) == ("", joined.authority)

    asyncio.run(main())


def test_ten_thousand_guesses_are_refused_and_counted_and_leave_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stranger:
        """A call that brings a guess."""

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return token_metadata(secrets.token_urlsafe(16))

    async def main() -> None:
        async with running(tmp_path) as run:
            rendezvous, asked = run.rendezvous, join_pb2.EnrolRequest(name="m", protocol=PROTOCOL)
            _, secret = rendezvous.run.invitations.add(1, 1)
            for number in range(GUESSES):
                if number == GUESSES - 500:
                    tracemalloc.start()
                asked.unix_s = int(time.time())
                with pytest.raises(StatusError, match="the router knows no such ticket"):
                    await rendezvous.Enrol(asked, Stranger())
            gc.collect()
            kept_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert kept_bytes < 500 * 64, "nothing of each"
            assert rendezvous.refused == {"Enrol": GUESSES}
            assert (rendezvous.machines, [each.uses for each in rendezvous.run.invitations.all()]) == ({}, [1])
            lines = [line.getMessage() for line in caplog.records if "refused" in line.getMessage()]
            assert (len(lines), lines[-1][:22]) == (14, "Enrol refused, 8192 so")
            assert secret not in caplog.text
            # over the network, and then one who was invited
            outcomes = await asyncio.gather(
                *(run.enrol(tmp_path / f"m{i}", "guess", "m") for i in range(32)), return_exceptions=True
            )
            assert {each.code() for each in outcomes} == {grpc.StatusCode.UNAUTHENTICATED}
            assert (await run.enrol(tmp_path / "m", secret, "m")).name == "m"

    asyncio.run(main())


def test_a_machine_says_that_it_ends_and_still_takes_what_is_under_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, a=True, b=True) as run:
            run.rendezvous.neighbours = {"a": {"b"}}
            await run.machines["b"].leave()
            assert (run.rendezvous.present, run.rendezvous.leaving) == (["a"], {"b"})
            assert await reach(run.machines["a"].dial, "b", run.machines["a"].tls) == 1
            await eventually(lambda: "link a to b: direct" in run.said)
            run.rendezvous.kinds["a", "b"] = "relayed"
            await run.machines["a"]._stub.Reach(join_pb2.ReachRequest(to="b", kind="direct"))
            assert run.said[-1] == "link a to b: direct (it was relayed)"
        assert "b leaves" in run.said

    asyncio.run(main())


def test_a_machine_that_listens_again_soon_keeps_its_direct_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(tmp_path, a=True, b=True) as run:
            links, now = run.machines["a"], 0.0
            run.rendezvous.neighbours = {"a": {"b"}}
            assert await reach(links.dial, "b", links.tls) == 1
            monkeypatch.setattr("stages.wire.links.monotonic", lambda: now)
            links._direct = lambda addresses, name: asyncio.sleep(0)  # it is between two servers
            with pytest.raises(grpc.aio.AioRpcError, match="503"):
                await reach(links.dial, "b", links.tls)
            now = BETWEEN_S
            assert await reach(links.dial, "b", links.tls) == 1
            assert links._ways["b"][0] == "reversed", "it can still be had, another way"

    asyncio.run(main())


def test_a_relayed_connection_changes_over_to_a_better_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.wire.links.CHOSEN_S", 0.01)

    async def main() -> None:
        async with running(tmp_path, a=False, b=False, c=False) as run:
            run.rendezvous.neighbours = {"a": {"b"}, "c": {"a"}}
            for here, there in (("a", "b"), ("c", "a")):
                links = run.machines[here]
                proxy = await LinkProxy(links.dial).open()
                async with proxy, open_channel(link_address(there), security=Security(links.tls)) as channel:
                    check = health_pb2_grpc.HealthStub(channel).Check
                    asked = health_pb2.HealthCheckRequest()
                    assert (await check(asked, timeout=PATIENCE_S)).status == 1
                    await eventually(lambda pair=(here, there): run.rendezvous.kinds.get(pair) == "relayed")
                    # the one can be dialled from now on, the other can dial
                    opened = run.machines["b" if here == "a" else "c"]
                    opened.told = (f"127.0.0.1:{opened.own[1]}",)
                    run.rendezvous.machines["b"].addresses = opened.told if here == "a" else ()
                    due = "direct" if here == "a" else "reversed"
                    await eventually(lambda links=links, there=there: there not in links._ways)
                    while run.rendezvous.kinds[here, there] != due:
                        with contextlib.suppress(grpc.aio.AioRpcError):  # in the turn in which the old one ends
                            assert (await check(asked, timeout=PATIENCE_S, wait_for_ready=True)).status == 1

    asyncio.run(main())


def test_a_relayed_link_has_a_line_of_advice() -> None:
    kinds = {
        ("oslo", "lyon"): "relayed",
        ("lyon", "rome"): "direct",
        ("rome", "oslo"): "relayed",
        ("a", "b"): "relayed",
    }
    record = LinkRecord("", kinds, {"lyon": "10.0.0.1:7701", "oslo": "[fd00::2]:40001"}, ("invite somebody",))
    lines = record.advice_on([*kinds][:3], {"oslo": 61.4, "lyon": 70.0, "rome": 20.0})
    assert lines == [
        "invite somebody",
        "lyon and oslo relay over the router: open TCP 7701 on lyon or TCP 40001 on oslo, about 61 ms less a trip",
        "oslo and rome relay over the router: open TCP 40001 on oslo, about 20 ms less a trip",
    ]


def test_the_proxy_serves_this_process_alone(tmp_path: Path) -> None:
    async def main() -> None:
        dialled = list[str]()

        async def dial(name: str, local: SocketPipe) -> None:
            dialled.append(name)
            await local.read()

        server = await LinkProxy(dial).open()
        port = server.sockets[0].getsockname()[1]
        user = os.environ[LINKS_VARIABLE].removeprefix("http://").partition("@")[0]

        async def ask(line: str, user: str) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            shown = base64.b64encode(user.encode()).decode()
            writer.write(f"{line}\r\nProxy-Authorization: Basic {shown}\r\n\r\n".encode())
            with contextlib.suppress(ConnectionError):  # who is cut off may learn of it by either
                writer.write_eof()
                return await reader.read()
            return b""

        line = "CONNECT paris.onesweep:7701 HTTP/1.1"
        assert b"200 OK" in await ask(line, user)
        for other in ("CONNECT example.org:443 HTTP/1.1", "GET / HTTP/1.1"):
            assert b"403" in await ask(other, user)
        assert b"403" in await ask(line, "onesweep:guess")
        assert await ask("CONNECT " + "a" * 200_000, user) == b""
        assert dialled == ["paris"]
        server.close()

    asyncio.run(main())


def test_a_machine_that_was_let_go_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stages.wire.rendezvous.LOOK_S", 0.01)

    async def main() -> None:
        async with running(tmp_path, a=True) as run:
            there = run.machines["a"]
            run.rendezvous.run.keep("a", None)
            await eventually(lambda: "a is let go" in run.said)
            links = MachineLinks("a", there.tls, [run.address], there._secret, there.own, tuple)
            with pytest.raises(StatusError, match="this machine has not joined"):
                await links.attend()
            assert "Attend of a refused" in caplog.text
            with pytest.raises(grpc.aio.AioRpcError, match="code 410"):
                await reach(run.rendezvous.dial, "a", run.rendezvous.run.tls)
            await links.close()

    asyncio.run(main())


def test_a_second_attendance_ends_the_first_and_kinds_are_words_of_ours(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, a=True, b=True) as run:
            run.rendezvous.neighbours = {"a": {"b"}}
            proxy, own = await LinkProxy(run.rendezvous.dial).open(), run.rendezvous.machines["b"]
            async with proxy, open_channel(link_address("b"), security=Security(run.rendezvous.run.tls)) as channel:
                asked = health_pb2.HealthCheckRequest()
                await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=PATIENCE_S)
                assert len(own.pipes) == 1
                run.machines["b"]._addresses = lambda: ("10.77.0.9:7701",)
                own.dismiss()
                await eventually(lambda: not own.pipes and own.addresses == ("10.77.0.9:7701",))
            shown = token_metadata(run.machines["a"]._secret)
            channel, stub = run.stub("")
            async with channel:
                first = stub.Attend(join_pb2.AttendRequest(), metadata=shown)
                assert await first.read() == join_pb2.Notice()
                second = stub.Attend(join_pb2.AttendRequest(), metadata=shown)
                assert await second.read() == join_pb2.Notice()
                assert await first.read() == join_pb2.Notice(), "the last"
                assert await first.read() is grpc.aio.EOF
                with pytest.raises(grpc.aio.AioRpcError, match="a link is direct, reversed, relayed"):
                    await stub.Reach(join_pb2.ReachRequest(to="b", kind="\x1b]0;"), metadata=shown)

    asyncio.run(main())
