"""Joined machines reach each other by each kind of link; strangers do not."""

import asyncio
import base64
import contextlib
import os
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.v1 import join_pb2
from stages.wire.channel import LINKS_VARIABLE, open_channel
from stages.wire.link_quality import LinkRecord
from stages.wire.links import BETWEEN_S, TO_KEY, LinkProxy, link_address
from stages.wire.pipes import PIECE_BYTES, PIPE_BYTES, PIPE_KEY, SocketPipe
from stages.wire.status import StatusError
from stages.wire.tls import Security
from tests.conftest import PATIENCE_S, eventually, refused
from tests.stages.wire.conftest import reach, running

MIN_HELD = 4 << 20  # buffered by a connection over a relay, in kernels and machines that read at once


async def test_each_kind_of_link_reaches_its_machine(tmp_path: Path) -> None:
    async with running(tmp_path, a=True, b=True, c=False, d=False) as run:
        run.rendezvous.neighbours = {"a": {"b", "c"}, "c": {"d"}}
        own = run.rendezvous.run
        assert await reach(run.rendezvous.dial, "c", own.tls) == 1
        for here, there, kind in (("a", "b", "direct"), ("a", "c", "reversed"), ("c", "d", "relayed")):
            links = run.machines[here]
            assert await reach(links.dial, there, links.tls) == 1
            line = f"link {here} to {there}: {kind}"
            await eventually(lambda line=line: line in run.lines)
        record = LinkRecord.read(run.rendezvous.run.directory)
        assert record.kinds == {("a", "b"): "direct", ("a", "c"): "reversed", ("c", "d"): "relayed"}
        # c keeps no channel to the address of a, which may be another machine's tomorrow
        assert len(run.machines["c"]._channels) == 1


async def test_a_machine_reaches_only_its_neighbours_and_opens_only_awaited_pipes(tmp_path: Path) -> None:
    async with running(tmp_path, a=True, b=True) as run:
        links = run.machines["a"]
        with pytest.raises(grpc.aio.AioRpcError, match="503"):
            await reach(links.dial, "b", links.tls)
        assert run.rendezvous.refused["Reach"] > 0
        run.rendezvous.neighbours = {"a": {"b"}}
        channel, stub = run.stub("")  # a stranger
        async with channel:
            for call in (stub.Reach(join_pb2.ReachRequest(to="b")), stub.Carry(metadata=((TO_KEY, "b"),)).read()):
                with refused(grpc.StatusCode.UNAUTHENTICATED):
                    await call
            for pipe in ("", "0" * 32):
                with pytest.raises(grpc.aio.AioRpcError, match="no one is waiting for this pipe"):
                    await stub.Carry(metadata=((PIPE_KEY, pipe), *links._shown)).read()


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


async def test_a_slow_reader_delays_the_writer_and_the_relay_buffers_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, a=False, b=False) as run:
        read, max_held, may_read = 0, 0, asyncio.Semaphore(0)
        flood, budget = Flood(), run.rendezvous.budget

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal read, max_held
            while not reader.at_eof():
                await may_read.acquire()
                read += len(await reader.read(PIECE_BYTES))
                max_held = max(max_held, flood.sent_bytes - read)

        server = await asyncio.start_server(slow, "127.0.0.1", 0, limit=PIECE_BYTES)
        server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        run.machines["b"].own = server.sockets[0].getsockname()[:2]
        run.rendezvous.neighbours = {"a": {"b"}, "b": {"a"}}
        flow = asyncio.create_task(run.machines["a"].dial("b", flood))
        pair = frozenset("ab")
        while read < 4 * MIN_HELD:
            may_read.release()
            await asyncio.sleep(0)
        assert max_held < 2 * MIN_HELD
        assert budget.held[pair] == PIPE_BYTES
        assert MIN_HELD < budget.carried[pair] <= flood.sent_bytes
        monkeypatch.setattr("stages.wire.pipes.PAIR_BYTES", PIPE_BYTES)
        with pytest.raises(StatusError, match="can hold at most 2 MB for b and a"):
            await run.machines["b"].dial("a", Flood())
        monkeypatch.setattr("stages.wire.pipes.RELAY_BYTES", PIPE_BYTES)
        with pytest.raises(StatusError, match="can hold at most 2 MB for all machines"):
            await run.rendezvous.dial("a", Flood())
        flow.cancel()
        await asyncio.gather(flow, return_exceptions=True)
        await eventually(lambda: not budget.held)
        server.close()


async def test_a_machine_that_restarts_soon_keeps_its_direct_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_a_relayed_connection_moves_to_a_better_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.wire.links.CHOSEN_S", 0.01)
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
                opened.announced = (f"127.0.0.1:{opened.own[1]}",)
                run.rendezvous.machines["b"].addresses = opened.announced if here == "a" else ()
                due = "direct" if here == "a" else "reversed"
                await eventually(lambda links=links, there=there: there not in links._ways)
                while run.rendezvous.kinds[here, there] != due:
                    with contextlib.suppress(grpc.aio.AioRpcError):  # in the turn in which the old one ends
                        assert (await check(asked, timeout=PATIENCE_S, wait_for_ready=True)).status == 1


def test_a_relayed_link_comes_with_advice() -> None:
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
        "lyon and oslo relay through the router: open TCP 7701 on lyon or TCP 40001 on oslo to save about 61 ms a trip",
        "oslo and rome relay through the router: open TCP 40001 on oslo to save about 20 ms a trip",
    ]


async def test_the_proxy_refuses_other_processes(tmp_path: Path) -> None:
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
        with contextlib.suppress(ConnectionError):  # either may report the cut
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
