"""The ring itself: hosts that come, go and come back under other names, and those that were found to lie."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.router.accounting import Account
from serving.router.host_link import HostLink
from serving.router.paths import RETURN_S
from serving.router.ring import Ring, RingView
from serving.router.session import Session
from serving.router.topology import HostEntry, Topology, local_topology
from stages import clock
from stages.host.next_hosts import MAX_TOGETHER, Subscribers
from stages.host.sessions import SessionStore
from stages.v1 import stage_pb2
from stages.wire.auth import SERVICE
from stages.wire.channel import new_server
from stages.wire.link_quality import LINKS_NAME
from stages.wire.status import MAX_PARTS, StatusError
from tests.conftest import eventually
from tests.stages.hops import step


@pytest.fixture(scope="module")
def topology(bundles: Path, module_servers: Any) -> Topology:
    """Two hosts that run."""
    planned = local_topology(2, 3, bundles / "own", free_port_block(3) + 1)
    module_servers.hosts(planned, bundles / "own")
    return planned


@asynccontextmanager
async def opened(topology: Topology) -> AsyncIterator[Ring]:
    ring = Ring()
    ring.set_hosts(topology.hosts)
    try:
        await eventually(lambda: not RingView(ring).problem)
        yield ring
    finally:
        await ring.close()


async def write(ring: Ring) -> bytes:
    """A byte by `ar`."""
    view = RingView(ring)
    await eventually(lambda: not view.problem)
    deadline = 2**42
    with Session(view, "ar", 8, deadline, Account()) as session:
        await session.push(step(remaining=1, codec="fp32"), b"The sea")
        return (await session.event()).text


async def test_a_session_is_renewed_while_others_compute(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease begins again without a hop."""
    renewed = list[str]()
    monkeypatch.setattr(SessionStore, "renew", lambda store, session, now_s: renewed.append(session.router))
    async with opened(topology) as ring:
        with Session(RingView(ring), "ar", 8, 2**42, Account()) as session:
            await session.push(step(remaining=1, codec="fp32"), b"The sea")
            await session.event()
            renewed.clear()
            await eventually(lambda: len(renewed) >= 2)


async def test_a_host_returns_under_another_name(topology: Topology) -> None:
    """At the same address: the link to it is a new one, and is kept."""
    async with opened(topology) as ring:
        before = await write(ring)
        for round_ in range(2):
            ring.set_hosts([replace(host, name=f"{host.name}-{round_}") for host in topology.hosts])
            assert {link.problem != "" for link in ring.links} == {True}
            assert await write(ring) == before
        assert [link.entry.name for link in ring.links] == ["host-1-1", "host-2-1"]


@pytest.mark.parametrize("count", [MAX_TOGETHER + 1, MAX_PARTS], ids=["more than one message", "endless"])
async def test_a_host_that_floods_events_is_quarantined(count: int) -> None:
    asked, heard = list[bytes](), list[stage_pb2.Event]()

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked.append(request)
        yield b""
        yield b"\x0a\x00" * count  # empty events
        await asyncio.Event().wait()

    server, method = new_server(), grpc.unary_stream_rpc_method_handler(flood)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Subscribe": method}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    ring = Ring()
    await server.start()
    ring.set_hosts([HostEntry("liar", address, (0, 1, 2), address)])
    ring.begin((link := ring.links[0],), lambda _, event: heard.append(event))
    try:
        await eventually(lambda: link.quarantined)
        assert link.quarantined.startswith("it sent 257" if count == 257 else "the answer is not a message")
        assert ({event.fault.lost for event in heard}, len(asked)) == ({address}, 1)
    finally:
        await ring.close()
        await server.stop(0)


async def test_each_quarantine_of_a_host_is_longer_and_outlasts_its_registration(topology: Topology) -> None:
    async with opened(topology) as ring:
        for hours in (1, 2, 4):
            ring.quarantine(ring.links[1], "it computed something else")
            ring.set_hosts(topology.hosts[:1])
            ring.set_hosts(topology.hosts)
            await (link := ring.links[1]).describe()
            assert link.problem.endswith(f"it gets no work for {hours} h")
            assert ring.choose(next(iter(ring.links[0].held))) is None
            assert link.quarantined_until - time.monotonic() == pytest.approx(3600 * hours, abs=600)
            link.quarantined_until = time.monotonic()
            await link.describe()
            assert link.problem == ""


async def test_a_silent_host_is_lost_and_awaited_for_longer_where_it_may_return(tmp_path: Path) -> None:
    now = [100.0]
    entry = HostEntry("frozen", "127.0.0.1:1", (0,), "127.0.0.1:1")
    with clock.replaced(lambda: now[0]):
        ring, link = Ring(), HostLink(entry, 5.0)
        ring.links, link.problem, link.relay.asked_at = [link], "", 100.0
        for passed_s, lost in ((0.1, False), (2.0, False), (0.1, True)):  # after two seconds in one it was the router
            now[0] += passed_s
            ring.look()
            assert (bool(link.problem), link.lost_at is not None) == (lost, lost)
    assert "is lost (it has been silent for 2.2 s)" in link.problem
    assert [ring.gives_up_at(begin_s) for begin_s in (100.0, 104.0)] == pytest.approx([107.2, 109.0])
    ring.run, record = tmp_path, tmp_path / LINKS_NAME  # with certificates
    ring._lose(link, "it closed the connection")
    assert "check that it runs" in link.problem
    assert link.lost_at is not None
    record.write_text('{"proxy": "127.0.0.1:2"}')  # with machines that joined
    ring._lose(link, "it closed the connection")
    assert link.problem.endswith("(it closed the connection); machines that joined replace it, or add one")
    assert (link.lost_at, ring.gives_up_at(100.0)) == (None, 100.0 + RETURN_S)
    record.write_text('{"proxy": "127.0.0.1:2", "advice": ["block 0 is on no machine"]}')
    assert ring.gives_up_at(100.0) == 105.0


async def test_a_request_waits_for_a_host_that_loads_and_not_for_one_that_reaches_no_other() -> None:
    ring, relay, now = Ring(), SimpleNamespace(hop_timeout_s=5.0), [100.0]
    ring.links = [link := HostLink(HostEntry("b", "127.0.0.1:1", (0,), "127.0.0.1:1"), 5.0, relay=cast("Any", relay))]
    info = stage_pb2.DescribeResponse(blocks=[0], links=[stage_pb2.LinkInfo(problem="cannot be reached")])
    relay.describe = AsyncMock(return_value=info)
    with clock.replaced(lambda: now[-1]):
        for at_s, gives_up_at in ((100.0, 105.0), (180.0, 185.0), (184.0, 185.0)):
            now.append(at_s)
            info.releases.extend([stage_pb2.Release(chain={"digest": "0"})] * (at_s == 184.0))  # loaded
            await link.describe()
            assert (ring.gives_up_at(100.0), ring.gives_up_at(100.0, 0.0)) == (gives_up_at, 105.0)
        assert relay.asked_at is None, "it answers again: it is not lost at once for its silence before"
        with pytest.raises(StatusError, match=r"\(waited 0.0 s\)"):  # there is time left to answer
            await asyncio.wait_for(RingView(ring).usable(184.3), 5.0)
    link.returning_at = 1e9
    # others hold the places of those that wait longer; the caller has another router
    for ring.patience.most_waiting, return_s in ((0, RETURN_S), (32, 0.0)):
        now.append(begin_s := 184.0)
        with clock.replaced(lambda: now.append(now[-1] + 6.0) or now[-1]), pytest.raises(StatusError, match="ready"):
            await RingView(ring).usable(return_s=return_s)
        assert now[-1] < begin_s + RETURN_S


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_requests_of_a_silent_host_move_only_if_another_can_serve_them(
    topology: Topology, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    async with opened(topology) as ring:
        link, messages = ring.links[0], list[str]()
        ring.begin(tuple(ring.links), lambda attempt, event: messages.append(event.fault.message))
        monkeypatch.setattr(ring, "choose", lambda weights: tuple(ring.links) if elsewhere else None)
        ring._lose(link, "it has been silent for 1.5 s", is_gone=False)
        assert len(messages) == elsewhere
        assert "silent" in link.problem
        ring._lose(link, "it closed the connection")
        assert len(messages) == elsewhere + 1


async def test_a_host_that_closes_its_event_stream_is_lost(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def listen(subscribers: Subscribers, router: str, key: bytes) -> AsyncIterator[stage_pb2.Events]:
        yield stage_pb2.Events()
        await eventually(ended.is_set)

    monkeypatch.setattr(Subscribers, "listen", listen)
    async with opened(topology) as ring:
        ended.set()
        await eventually(lambda: "is lost (it closed the connection)" in ring.links[0].problem)
