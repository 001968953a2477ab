"""Requests over hosts that are full, late or lost, and sessions that are freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client, RouterError
from serving.router import paths as links
from serving.router.paths import HostLink
from serving.router.topology import HostEntry, Topology, local_topology
from stages.v1 import stage_pb2

PROMPT = b"The sea was calm. The sea was "


@pytest.fixture(scope="module")
def ring_client(bundles: Path, local_ring: Callable[..., Any]) -> Iterator[Client]:
    with local_ring(bundles / "own", 3, ring={"keep_warm_s": 0.0}) as client:
        yield client


def test_one_host_is_a_ring(bundles: Path, local_ring: Callable[..., Any]) -> None:
    with local_ring(bundles / "own", 1) as client:
        assert client.generate(PROMPT, mode="ar", max_bytes=5).sweeps == 5
        assert client.generate(PROMPT, mode="sweep", max_bytes=5).output_bytes == 5


def test_text_comes_as_it_is_made(ring_client: Client) -> None:
    assert len(list(ring_client.stream(PROMPT, mode="ar", max_bytes=9))) == 10


@pytest.mark.parametrize("mode", ["sweep", "ar", "ar-speculative"])
def test_a_host_that_is_full(bundles: Path, servers: Any, wait_ready: Any, mode: str) -> None:
    topology = local_topology(3, 3, bundles / "own", free_port_block(4) + 1)
    for host in topology.hosts:
        memory = 0 if host.name == "host-3" else 64
        servers.stage(
            bundles / "own", host.blocks, host.listen, topology.successors(host), name=host.name, session_mb=memory
        )
    servers.router(topology, None)
    wait_ready(topology.router)
    with Client(topology.router) as client:
        with pytest.raises(RouterError, match=r"host-3 at .* refused: no memory for another session") as caught:
            client.generate(PROMPT, mode=mode, max_bytes=5)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_ms == 1000


def test_a_deadline(ring_client: Client) -> None:
    with pytest.raises(RouterError) as caught:
        ring_client.generate(PROMPT, mode="ar", max_bytes=450, timeout_s=0.1)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ring_client.generate(PROMPT, mode="ar", max_bytes=5).output_bytes == 5


def sessions_of(topology: Topology, describe: Callable[[str], stage_pb2.DescribeResponse]) -> list[int]:
    return [describe(host.address).counters.sessions for host in topology.hosts]


def test_a_host_that_goes_and_clients_that_leave(
    bundles: Path,
    servers: Any,
    wait_ready: Any,
    until: Callable[..., Any],
    describe: Callable[[str], stage_pb2.DescribeResponse],
) -> None:
    topology = local_topology(2, 3, bundles / "own", free_port_block(3) + 1)
    hosts = servers.hosts(topology, bundles / "own")
    servers.router(topology, None)
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


@pytest.mark.parametrize(
    ("option", "says"),
    [
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
