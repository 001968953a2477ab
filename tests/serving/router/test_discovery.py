"""A router that learns its hosts from a registry."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from serving.router.discovery import await_topology, fitting, follow_hosts
from serving.router.topology import MAX_HOSTS, HostEntry, Topology
from stages.errors import ServiceError
from stages.host.host import HostSettings
from stages.host.server import StageServer
from stages.host.settings import StageSettings
from stages.wire.flags import open_registry
from stages.wire.registry import Registration, RegistrySettings, parse_url
from stages.wire.tls import LOOPBACK_ONLY
from tests.conftest import eventually, jobs, until

pytest.importorskip("etcd3gw", reason="etcd3gw is not installed: pip install 'onesweep[etcd]'")

Run = Callable[..., tuple[int, str, str]]

PARIS, TOKYO = (Registration(name, f"127.0.0.1:{7701 + i}", (i,)) for i, name in enumerate(("paris", "tokyo")))


def host(name: str, *blocks: int, address: str = "") -> HostEntry:
    address = address or f"127.0.0.1:{7000 + ord(name[0])}"
    return HostEntry(name, address, blocks, address)


RING = [host("paris", 0), host("tokyo", 1, 2)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (host("lima", 7), "no sweep can pass its blocks 7"),
        (host("lima", 0, 1), "no sweep can pass its blocks 0,1"),
        (host("lima", 1, 2, 3), "no sweep can pass its blocks 1,2,3"),
        (host("lima", 0, address="10.0.0.1:7701"), "traffic would not be encrypted"),
        (host("http", 0), "a host cannot be called 'http'"),
    ],
)
def test_who_does_not_fit_is_left_out(wrong: HostEntry, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """And harms nobody else."""
    entries = sorted([*RING, wrong], key=lambda entry: entry.blocks)
    assert fitting(entries, RING, 3, LOOPBACK_ONLY) == RING
    assert f"host {wrong.name} is left out" in caplog.text
    assert why in caplog.text


def test_of_too_many_the_known_stay() -> None:
    crowd = [host(f"h{i}", 0, address=f"127.0.0.1:{8000 + i}") for i in range(MAX_HOSTS)]
    kept = fitting([*crowd, *RING], RING, 3, LOOPBACK_ONLY)
    assert len(kept) == MAX_HOSTS
    assert set(RING) < set(kept)
    Topology(tuple(kept))


async def test_a_ring_is_told_of_changes(registry_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """And keeps its hosts where the new ones make no ring."""
    registry, told = open_registry(RegistrySettings(*parse_url(registry_url))), []

    def set_hosts(entries: Sequence[HostEntry]) -> None:
        told.append([entry.name for entry in entries])

    async with jobs(follow_hosts(registry, 2, LOOPBACK_ONLY, set_hosts), registry.register(TOKYO)):
        await eventually(lambda: [each for each in caplog.messages if "block 0 is missing" in each])
        async with jobs(registry.register(PARIS)):
            await eventually(lambda: told == [["paris", "tokyo"]])


def test_hosts_are_not_waited_for_longer_than_asked(registry_url: str) -> None:
    settings = RegistrySettings(*parse_url(registry_url))
    with pytest.raises(ServiceError, match=r"no whole ring was registered within 0\.5 s: .* hosts, not 0"):
        await_topology(settings, "127.0.0.1:7700", within_s=0.5)


def test_the_doctor_examines_hosts_that_are_registered(
    registry_url: str, bundles: Path, servers: Any, unused_port: int, onesweep: Run
) -> None:
    where, host = f"127.0.0.1:{unused_port}", HostSettings("whole")
    registry = open_registry(RegistrySettings(*parse_url(registry_url)))
    server = StageServer(StageSettings(bundles / "own", (0, 1, 2), where, (), host, threads=1, registry=registry))
    servers.run(server.run)

    def examined() -> dict[str, Any]:
        code, out, _ = onesweep("doctor", "--registry", registry_url, "--json")
        return json.loads(out) if code == 0 else {}

    report = until(examined)
    assert [machine["name"] for machine in report["machines"]] == ["router", "whole"]
