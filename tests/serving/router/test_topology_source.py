"""A topology that changes: who follows it, and what changes nothing."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving.cli.parser import parse
from serving.cli.ports import free_port_block
from serving.cli.serve import host_settings
from serving.client.client import Client
from serving.router import topology_source
from serving.router.topology import HostEntry, Topology, local_topology
from serving.router.topology_source import TopologyFile, follow_topology, topology_at
from stages.errors import InputError, ServiceError
from stages.host.server import StageServer
from tests.conftest import Run, eventually, jobs, until, wait_ready


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(topology_source, "FOLLOW_S", 0.01)
    caplog.set_level(logging.INFO)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def write_whole(path: Path, text: str) -> None:
    """As an operator's tools do: who reads meanwhile never finds a part."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def names(topology: Topology) -> list[str]:
    return [host.name for host in topology.hosts]


async def test_an_invalid_topology_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole, heard = tmp_path / "t.toml", local_topology(3, 3, Path("/w")), list[list[str]]()
    write_whole(path, whole.to_toml())

    def use(topology: Topology) -> None:
        if len(topology.hosts) == 2:
            raise InputError("two are not enough")
        heard.append(names(topology))

    async with jobs(follow_topology(TopologyFile(path), whole, use)):
        write_whole(path, "hosts = []")
        await eventually(lambda: "1 to 64 hosts, not 0" in caplog.text)
        path.unlink()
        await eventually(lambda: "No such file" in caplog.text)
        write_whole(path, whole.to_toml())
        await eventually(lambda: "can be read again" in caplog.text)
        write_whole(path, local_topology(2, 3, Path("/w")).to_toml())
        await eventually(lambda: "two are not enough" in caplog.text)
        assert heard == []
        write_whole(path, local_topology(1, 3, Path("/w")).to_toml())
        await eventually(lambda: heard == [["host-1"]])
    assert len([line for line in caplog.messages if "stay unchanged" in line]) == 3


async def test_an_outage_with_changing_messages_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    whole, reads = local_topology(1, 3, Path("/w")), 0

    class Away:
        def read(self) -> Topology:
            nonlocal reads
            reads += 1
            if reads < 5:
                raise ServiceError(f"no answer, for the {reads}th time")
            return whole

    async with jobs(follow_topology(Away(), whole, lambda _: None)):
        await eventually(lambda: "can be read again" in caplog.text)
    assert [line for line in caplog.messages if "stay unchanged" in line] == [
        "the hosts stay unchanged: no answer, for the 1th time"
    ]


@pytest.mark.parametrize("kind", ["file", pytest.param("etcd", marks=pytest.mark.slow)])
def test_hosts_and_router_follow_a_changed_topology(
    kind: str,
    bundles: Path,
    servers: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    stack: contextlib.ExitStack,
    onesweep: Run,
) -> None:
    """None of them is restarted; a host that has left its place stays as it was."""
    if kind == "etcd":
        etcd = stack.enter_context(request.getfixturevalue("etcd_with")())
        where, write = etcd.url, etcd.put
    else:
        where, write = str(tmp_path / "t.toml"), partial(write_whole, tmp_path / "t.toml")
    before = local_topology(2, 3, bundles / "own", (port := free_port_block(4)) + 1)
    write(before.to_toml())

    def start(name: str) -> None:
        command = ["host", name, "--topology", where, "--threads", "1"]
        servers.run(StageServer(host_settings(parse(command))).run)

    def links() -> list[int]:
        return [len(host.links) for host in client.status().hosts]

    start("host-1")
    start("host-2")
    servers.router(before, None, source=topology_at(where))
    wait_ready(before.router)
    address = f"127.0.0.1:{port + 3}"
    more = replace(before, hosts=(*before.hosts, HostEntry("again", address, before.hosts[1].blocks, address)))
    write(more.to_toml())
    start("again")
    with Client(before.router) as client:
        until(lambda: links() == [2, 1, 1] and client.status().ready)
        _, report, _ = onesweep("doctor", "--topology", where, "--json")
        assert [machine["name"] for machine in json.loads(report)["machines"][1:]] == names(more)
        place = replace(more.hosts[1], listen="127.0.0.1:9")
        write(replace(more, hosts=(more.hosts[0], place, more.hosts[2])).to_toml())
        until(lambda: f"{where} no longer has host-2 with blocks 2 of 3 at {place.address}" in caplog.text)
        far = replace(more.hosts[1], address="10.0.0.1:9")
        write(replace(more, hosts=(more.hosts[0], far, more.hosts[2])).to_toml())
        until(lambda: caplog.text.count("unchanged: address 10.0.0.1:9 is on another") == 2)  # host-1, router
        write(before.to_toml())
        until(lambda: links() == [1, 1])
        assert client.generate("The sea", mode="sweep", max_bytes=8).text


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://", r"must be a file, or etcd://HOST:PORT\[,HOST:PORT\]/KEY"),
        ("etcd://127.0.0.1:2379/one sweep", "must be a file, or"),
        ("etcd://127.0.0.1:2379/x?authority=ca.pem", "must be a file, or"),
        ("etcd:///onesweep", "etcd's address '' must be HOST:PORT"),
        ("etcd://127.0.0.1/onesweep", "must be HOST:PORT"),
        ("etcd://user:secret@127.0.0.1:2379/onesweep", "must be HOST:PORT"),
        ("etcd://127.0.0.1:1/x?cert=a.pem", "cert=FILE and key=FILE belong together"),
        ("etcd://127.0.0.1:1/x?ca=/nowhere/ca.pem", "/nowhere/ca.pem does not exist"),
        ("etcd://127.0.0.1:1,10.8.0.9:2379/x", r"10\.8\.0\.9:2379 is on another machine and traffic would not"),
    ],
)
def test_an_unusable_url_is_refused(url: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        topology_at(url)


def test_a_valid_url_is_used_by_every_command(onesweep: Run, unused_port: int) -> None:
    assert str(topology_at("etcd://10.8.0.9:2379,[::1]:2379/a/b-1", insecure=True)).endswith("/a/b-1")
    url = f"etcd://127.0.0.1:{unused_port}/x"
    for command in (("host", "host-1"), ("router",), ("doctor",)):
        code, _, err = onesweep(*command, "--topology", url)
        why = f"127.0.0.1:{unused_port} refuses connections"
        assert code == 1
        assert err == f"onesweep: no etcd answers at {url} ({why}): start it, or correct --topology\n"
