"""Three ways round the same hosts: the ring, calls in calls, and every hop by way of the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving import link as links
from serving.client import Client, RouterError
from serving.link import HostLink
from serving.ports import free_port_block
from serving.routes import ROUTES, check_route
from serving.topology import HostEntry, Topology, local_topology
from stages.errors import InputError
from stages.v1 import stage_pb2

PROMPT = b"The sea was calm. The sea was "
REQUESTS: list[dict[str, Any]] = [
    {"mode": "sweep", "max_bytes": 40, "seed": 1},
    {"mode": "chunked", "max_bytes": 40, "seed": 2, "chunk": 9, "codec": "int4"},
    {"mode": "ar", "max_bytes": 12, "seed": 3},
    {"mode": "ar", "max_bytes": 12, "seed": 3, "codec": "int8"},
    {"mode": "ar", "max_bytes": 1, "seed": 3},
    {"mode": "ar-speculative", "max_bytes": 24, "seed": 4, "drafter": "both", "draft": 5},
    {"mode": "resample", "max_bytes": 24, "seed": 5, "chunk": 10, "candidates": 6},
    {"mode": "verified", "max_bytes": 24, "seed": 6, "draft": 5},
]
EVERY_ROUTE = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def clients(bundles: Path, local_ring: Callable[..., Any]) -> Iterator[dict[str, Client]]:
    """Three hosts for each route."""
    with ExitStack() as stack:
        yield {
            route: stack.enter_context(local_ring(bundles / "own", 3, ring={"route": route, "keep_warm_s": 0.0}))
            for route in ROUTES
        }


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: f"{request['mode']}-{request['seed']}")
def test_every_route_writes_the_same(clients: dict[str, Client], request_: dict[str, Any]) -> None:
    results = {route: client.generate(PROMPT, **request_) for route, client in clients.items()}
    assert len({result.output for result in results.values()}) == 1
    assert {result.sweeps for result in results.values()} == {results["ring"].sweeps}
    for result in results.values():
        assert [host.name for host in result.hosts] == ["host-1", "host-2", "host-3"]
        assert all(host.compute_ms > 0 for host in result.hosts)


def test_a_chained_model_goes_every_way(bundles: Path, local_ring: Callable[..., Any]) -> None:
    texts = set()
    for route in ROUTES:
        with local_ring(bundles / "chained", 2, ring={"route": route}) as client:
            texts.add(client.generate(PROMPT, mode="chunked", chunk=16, max_bytes=40).output)
    assert len(texts) == 1


@EVERY_ROUTE
def test_one_host_serves_every_route(bundles: Path, local_ring: Callable[..., Any], route: str) -> None:
    with local_ring(bundles / "own", 1, ring={"route": route}) as client:
        assert client.generate(PROMPT, mode="ar", max_bytes=5).sweeps == 5
        assert client.generate(PROMPT, mode="sweep", max_bytes=5).output_bytes == 5


@EVERY_ROUTE
def test_pieces_come_as_they_are_made(clients: dict[str, Client], route: str) -> None:
    assert len(list(clients[route].stream(PROMPT, mode="ar", max_bytes=9))) == 10


# Faults come back with their code, whichever way they come


@EVERY_ROUTE
@pytest.mark.parametrize("mode", ["sweep", "ar", "ar-speculative"])
def test_a_host_that_is_full(bundles: Path, servers: Any, wait_ready: Any, route: str, mode: str) -> None:
    topology = local_topology(3, 3, bundles / "own", free_port_block(4) + 1)
    for host in topology.hosts:
        memory = 0 if host.name == "host-3" else 64
        servers.stage(
            bundles / "own", host.blocks, host.listen, topology.successors(host), name=host.name, session_mb=memory
        )
    servers.router(topology, None, ring={"route": route})
    wait_ready(topology.router)
    with Client(topology.router) as client:
        with pytest.raises(RouterError, match=r"host-3 at .* refused: no memory for another session") as caught:
            client.generate(PROMPT, mode=mode, max_bytes=5)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_ms == 1000


@EVERY_ROUTE
def test_a_deadline(clients: dict[str, Client], route: str) -> None:
    with pytest.raises(RouterError) as caught:
        clients[route].generate(PROMPT, mode="ar", max_bytes=450, timeout_s=0.1)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert clients[route].generate(PROMPT, mode="ar", max_bytes=5).output_bytes == 5


def sessions_of(topology: Topology, describe: Callable[[str], stage_pb2.DescribeResponse]) -> list[int]:
    return [describe(host.address).counters.sessions for host in topology.hosts]


@EVERY_ROUTE
def test_a_host_that_goes_and_clients_that_leave(
    bundles: Path,
    servers: Any,
    wait_ready: Any,
    until: Callable[..., Any],
    describe: Callable[[str], stage_pb2.DescribeResponse],
    route: str,
) -> None:
    topology = local_topology(2, 3, bundles / "own", free_port_block(3) + 1)
    hosts = servers.hosts(topology, bundles / "own")
    servers.router(topology, None, ring={"route": route})
    wait_ready(topology.router)
    with Client(topology.router) as client:
        stream = client.stream(PROMPT, mode="ar", max_bytes=450)
        next(stream)
        assert sessions_of(topology, describe) == [1, 1]
        stream.close()  # type: ignore[attr-defined]
        until(lambda: sessions_of(topology, describe) == [0, 0])
        until(lambda: client.status().requests == 0)

        hosts["host-2"].end()
        with pytest.raises(RouterError, match="host-2") as caught:
            client.generate(PROMPT, mode="sweep", max_bytes=5)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        first, second = topology.hosts
        servers.stage(bundles / "own", second.blocks, second.listen, first.address, name="host-2")
        wait_ready(topology.router)
        assert client.generate(PROMPT, mode="sweep", max_bytes=5).output_bytes == 5


def test_a_route_that_there_is_not() -> None:
    assert [check_route(route) for route in ROUTES] == list(ROUTES)
    with pytest.raises(InputError, match="unknown route 'tunnel'; choose from ring, nested, router"):
        check_route("tunnel")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--route", "tunnel"], "unknown route 'tunnel'"),
        (["--keep-warm-ms", "-1"], "--keep-warm-ms must be 0 (off) or 10 to 60000"),
        (["--keep-warm-ms", "9"], "--keep-warm-ms must be 0 (off) or 10 to 60000"),
    ],
)
def test_wrong_options_of_a_router(
    bundles: Path, tmp_path: Path, onesweep: Callable[..., tuple[int, str, str]], option: list[str], says: str
) -> None:
    path = tmp_path / "t.toml"
    path.write_text(local_topology(1, 3, bundles / "own", free_port_block(2) + 1).to_toml())
    code, _, err = onesweep("router", "--topology", path, *option)
    assert code == 2
    assert says in err


# Sessions are freed together


def test_sessions_that_end_together_are_freed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    class Stub:
        async def Release(self, request: stage_pb2.ReleaseRequest, timeout: float) -> stage_pb2.ReleaseResponse:
            calls.append(list(request.sessions))
            return stage_pb2.ReleaseResponse()

    async def story() -> None:
        link = HostLink(HostEntry("h", "127.0.0.1:1", (0,), "127.0.0.1:1"), "r", 1.0)
        monkeypatch.setattr(link.relay, "stub", Stub())
        await asyncio.gather(*(link.release(name) for name in "abc"))
        await link.release("d")
        await link.relay.close()

    monkeypatch.setattr(links, "RELEASE_AFTER_S", 0.05)
    asyncio.run(story())
    assert calls == [["a", "b", "c"], ["d"]]


def test_a_host_that_cannot_be_told_harms_nobody_and_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    class Stub:
        async def Release(self, request: stage_pb2.ReleaseRequest, timeout: float) -> stage_pb2.ReleaseResponse:
            calls.append(list(request.sessions))
            return stage_pb2.ReleaseResponse()

    async def story() -> None:
        link = HostLink(HostEntry("h", "127.0.0.1:1", (0,), "127.0.0.1:1"), "r", 1.0)
        await asyncio.gather(link.release("a"), link.release("b"))
        await link.release("c")
        monkeypatch.setattr(link.relay, "stub", Stub())
        await link.release()
        await link.relay.close()
        assert calls == [["a", "b", "c"]]

    asyncio.run(story())
