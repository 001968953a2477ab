"""Deployments that lose their router, or do without a host."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import HostEntry, Topology
from stages.checkpoint.release_store import read_release_manifest
from stages.host.server import StageServer
from stages.host.settings import HostSettings, StageSettings
from tests.conftest import until, wait_ready
from tests.serving.releases import Texts, answer

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]


def of_whole_models(hosts: int, checkpoint: Path) -> Topology:
    """Hosts that hold every block."""
    port = free_port_block(hosts + 1)
    places = [(f"h-{i}", f"127.0.0.1:{port + i}") for i in range(1, hosts + 1)]
    entries = tuple(HostEntry(name, address, (0, 1, 2), address) for name, address in places)
    return Topology(entries, f"127.0.0.1:{port}", checkpoint)


def start(servers: Any, host: HostEntry, bundle: Path, stores: Path) -> Any:
    store = stores / host.name
    settings = StageSettings(bundle, host.blocks, host.listen, (), HostSettings(host.name), releases=store)
    return servers.run(StageServer(settings).run)


def test_a_host_that_is_down_can_be_left_out(
    old: Path, new: Path, tmp_path: Path, servers: Any, onesweep: Run, texts: dict[str, Texts]
) -> None:
    topology = of_whole_models(2, old)
    running = [start(servers, host, old, tmp_path) for host in topology.hosts]
    servers.router(topology, old, releases=tmp_path / "router")
    wait_ready(topology.router)
    with Client(topology.router) as client:
        until(lambda: [host.ready for host in client.status().hosts] == [True, True])
        running[1].end()
        until(lambda: [host.ready for host in client.status().hosts] == [True, False])
        code, _, err = onesweep("deploy", new, "--router", topology.router, "--without", "nobody")
        assert (code, "there is no host 'nobody' to do without; there are h-1, h-2" in err) == (2, True)
        assert onesweep("deploy", new, "--router", topology.router)[0] == 1
        code, out, err = onesweep("deploy", new, "--router", topology.router, "--without", "h-2", "--json")
        assert (code, json.loads(out)["changed"]) == (0, True), err
        assert answer(client, "ar") == texts["new"]["ar"]
        start(servers, topology.hosts[1], old, tmp_path)
        name = read_release_manifest(new).name
        until(lambda: name in client.status().hosts[1].releases)


def test_two_routers_switch_together_or_not_at_all(old: Path, new: Path, tmp_path, servers, onesweep: Run) -> None:
    topology, second = of_whole_models(1, old), f"127.0.0.1:{free_port_block(1)}"
    both, alone = ["--router", f"{topology.router},{second}"], ["--router", topology.router]
    start(servers, topology.hosts[0], old, tmp_path)
    servers.router(topology, old, releases=tmp_path / "first")
    lacking = servers.router(replace(topology, router=second), old)
    before, after = (read_release_manifest(each).name for each in (old, new))

    def served(warns: bool) -> list[str]:
        with Client(topology.router) as first, Client(second) as other:
            until(lambda: ("brought release" in other.status().hosts[0].warning) is warns)
            return [each.status().release for each in (first, other)]

    wait_ready(topology.router)
    wait_ready(second)
    assert "has no release store" in onesweep("deploy", new, *both)[2]
    assert served(warns=False) == [before, before], "the first one could switch, and did not"
    until(lambda: onesweep("deploy", new, *alone)[0] == 0)  # once the first one is back
    assert served(warns=True) == [after, before]
    assert onesweep("deploy", "--rollback", *alone)[0] == 0
    lacking.end()
    servers.router(replace(topology, router=second), old, releases=tmp_path / "second")
    wait_ready(second)
    code, out, err = onesweep("deploy", new, *both)
    assert (code, out.count("modes that work"), served(warns=False)) == (0, 1, [after, after]), err
