"""A router that learns its hosts from a registry."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from serving.discovery import await_topology, entries_of, follow_hosts
from serving.topology import HostEntry
from stages.errors import ServiceError, TopologyError
from stages.host import HostSettings
from stages.registry import Registration, RegistrySettings, open_registry
from stages.registry.settings import parse_url
from stages.server import StageServer, StageSettings

pytest.importorskip("etcd3gw", reason="etcd3gw is not installed: pip install 'onesweep[etcd]'")

Run = Callable[..., tuple[int, str, str]]
Eventually = Callable[..., Any]
Jobs = Callable[..., Any]

PARIS, TOKYO = (Registration(name, f"127.0.0.1:{7701 + i}", (i,)) for i, name in enumerate(("paris", "tokyo")))


def settings_of(url: str) -> RegistrySettings:
    return RegistrySettings(*parse_url(url))


def test_entries_are_those_of_a_topology() -> None:
    assert entries_of([PARIS]) == [HostEntry("paris", "127.0.0.1:7701", (0,), "127.0.0.1:7701")]


def test_a_ring_is_told_of_changes(registry_url: str, eventually: Eventually, jobs: Jobs) -> None:
    """And keeps its hosts where the new ones make no ring."""
    registry, told = open_registry(settings_of(registry_url)), []

    def set_hosts(entries: Sequence[HostEntry]) -> None:
        names = [entry.name for entry in entries]
        told.append(names)
        if names == ["tokyo"]:
            raise TopologyError("block 0 is missing")

    async def scene() -> None:
        async with jobs(follow_hosts(registry, set_hosts), registry.register(TOKYO)):
            await eventually(lambda: told[-1:] == [["tokyo"]])
            async with jobs(registry.register(PARIS)):
                await eventually(lambda: told[-1] == ["paris", "tokyo"])

    asyncio.run(scene())


def test_a_router_waits_for_a_whole_ring(
    registry_url: str, eventually: Eventually, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    registry = open_registry(settings_of(registry_url))

    async def scene() -> Any:
        waiting = asyncio.create_task(asyncio.to_thread(await_topology, registry.settings, "127.0.0.1:7700"))
        async with jobs(registry.register(TOKYO)):
            await eventually(lambda: [message for message in caplog.messages if "block 0 is missing" in message])
            async with jobs(registry.register(PARIS)):
                return await waiting

    topology = asyncio.run(scene())
    assert [host.name for host in topology.hosts] == ["paris", "tokyo"]
    assert topology.router == "127.0.0.1:7700"


def test_hosts_are_not_waited_for_longer_than_asked(registry_url: str) -> None:
    settings = settings_of(registry_url)
    with pytest.raises(ServiceError, match=r"no whole ring was registered within 0\.5 s: .* hosts, not 0"):
        await_topology(settings, "127.0.0.1:7700", within_s=0.5)


def test_the_doctor_examines_hosts_that_are_registered(
    registry_url: str, bundles: Path, servers: Any, unused_port: int, until: Any, onesweep: Run
) -> None:
    where, host = f"127.0.0.1:{unused_port}", HostSettings("whole")
    registry = open_registry(settings_of(registry_url))
    server = StageServer(StageSettings(bundles / "own", (0, 1, 2), where, (), host, threads=1, registry=registry))
    servers.run(server.run)

    def examined() -> dict[str, Any]:
        code, out, _ = onesweep("doctor", "--registry", registry_url, "--json")
        return json.loads(out) if code == 0 else {}

    report = until(examined, 60)
    assert [machine["name"] for machine in report["machines"]] == ["router", "whole"]


@pytest.mark.parametrize("command", ["router", "doctor"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --topology FILE, or --registry URL"),
        (("--topology", "t.toml", "--registry", "etcd://127.0.0.1:1/x"), "give either --topology FILE, or --registry"),
        (("--registry", "consul://127.0.0.1:1/x"), "must be etcd://HOST:PORT[,HOST:PORT]/PREFIX"),
        (("--registry-key", "k.pem", "--topology", "t.toml"), "--registry-key says how to reach a registry"),
    ],
)
def test_a_command_is_told_where_hosts_are(
    command: str, arguments: tuple[str, ...], message: str, onesweep: Run
) -> None:
    code, _, err = onesweep(command, *arguments)
    assert code == 2
    assert message in err


def test_without_etcd_a_router_does_not_start(unused_port: int, onesweep: Run) -> None:
    code, _, err = onesweep("router", "--registry", f"etcd://127.0.0.1:{unused_port}/onesweep")
    assert code == 1
    assert f"(127.0.0.1:{unused_port} refuses connections)" in err
