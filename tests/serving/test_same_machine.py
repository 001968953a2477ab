"""Servers that are started on this machine serve the user who started them, and refuse every other."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.cli.ports import free_port_block
from serving.cli.servers import RECORD, fork_servers, server_arguments
from serving.client.client import Client
from serving.router.topology import local_topology
from serving.v1 import router_pb2, router_pb2_grpc
from stages.errors import ServiceError
from stages.host.server import StageServer
from stages.host.settings import HostSettings, StageSettings
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import open_blocking_channel
from stages.wire.tokens import Keyring, make_own_token, own_token, own_token_paths
from tests.conftest import Run, until, wait_ready

NOBODY = 65534
ROUTER_CALLS = ("Generate", "Draw", "Status", "Deploy", "Rollback")
HOST_CALLS = ("Describe", "Push", "Subscribe", "Release", "Warm", "Probe", "Store", "Load", "Drop")
HEALTHY = health_pb2.HealthCheckRequest()


def codes(router: str, host: str) -> dict[str, str]:
    """The status of each call to a router and a host without a token."""
    found = {}
    for address, stub, messages, names in (
        (router, router_pb2_grpc.RouterServiceStub, router_pb2, ROUTER_CALLS),
        (host, stage_pb2_grpc.StageServiceStub, stage_pb2, HOST_CALLS),
    ):
        with open_blocking_channel(address) as channel:
            health_pb2_grpc.HealthStub(channel).Check(HEALTHY, timeout=60, wait_for_ready=True)
            for name in names:
                kind = getattr(messages, {"Push": "HopBatch"}.get(name, f"{name}Request"))
                request = iter([kind()]) if name in ("Push", "Store", "Deploy") else kind()
                try:
                    answer = getattr(stub(channel), name)(request, timeout=60)
                    found[name] = f"OK {[*answer] if hasattr(answer, '__next__') else answer}"
                except grpc.RpcError as error:
                    found[name] = error.code().name
    return found


def test_without_the_token_a_router_and_a_host_refuse_every_call(
    bundles: Path, tmp_path: Path, state: Path, servers: Any, onesweep: Run
) -> None:
    bundle, topology = bundles / "own", local_topology(1, 3, bundles / "own", free_port_block(2) + 1)
    arguments = server_arguments(topology, bundle, tmp_path)
    tokens = {name: Path(words[words.index("--tokens") + 1]) for name, words in arguments.items()}
    (host,) = topology.hosts
    settings = StageSettings(
        bundle, host.blocks, host.listen, (), HostSettings(host.name), threads=1, tokens=tokens[host.name], drain_s=5.0
    )
    servers.run(StageServer(settings).run)
    servers.router(topology, bundle, tokens=tokens["router"])
    refused = codes(topology.router, host.address)
    assert refused == dict.fromkeys([*ROUTER_CALLS, *HOST_CALLS], "UNAUTHENTICATED")

    wait_ready(topology.router)
    with Client(topology.router.replace("127.0.0.1", "localhost")) as client:
        assert client.generate("The ", mode="ar", max_bytes=4).output_bytes == 4
        code, text, _ = onesweep("generate", "The ", "--mode", "ar", "--max-bytes", 4, "--router", topology.router)
        assert (code, onesweep("status", "--router", topology.router)[0], bool(text)) == (0, 0, True)
        own_token_paths(topology.router)[0].unlink()
        assert onesweep("status", "--router", topology.router)[0] == 2
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    secrets = [*tokens.values(), *state.iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert not any(own_token(host.address) in path.read_text() for path in tokens.values())


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, ["host-1", "router"]),
        ({"hosts_run": True}, ["router"]),
        ({"router_options": ["--anybody"]}, ["host-1"]),
        ({"host_options": ["--tokens", "f"], "router_options": ["--tokens", "f"]}, []),
    ],
)
def test_servers_with_their_own_access_options_get_no_token(
    bundles: Path, tmp_path: Path, state: Path, options: dict[str, Any], own: list[str]
) -> None:
    topology = local_topology(1, 3, bundles / "own", 7701)
    servers = server_arguments(topology, bundles / "own", tmp_path, **options)
    assert [name for name, words in servers.items() if str(tmp_path / f"{name}.tokens") in words] == own
    addresses = {"host-1": topology.hosts[0].address, "router": topology.router}
    assert {name for name, address in addresses.items() if own_token(address)} == {*own}
    far = replace(topology, hosts=(replace(topology.hosts[0], address="10.8.0.1:7701", listen="10.8.0.1:7701"),))
    assert "--tokens" not in server_arguments(far, bundles / "own", tmp_path)["host-1"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each server is started by itself")
def test_servers_are_forked_from_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)  # with it onnxruntime logs nothing
    words = ["host", "host-1", "--topology", str(tmp_path / "none.toml")]
    for name in fork_servers(tmp_path, {"host-1": words, "host-2": words}):
        text = until((tmp_path / f"{name}.log").read_text)
        assert text == f"onesweep: cannot read the topology {tmp_path / 'none.toml'}: No such file or directory\n"
    with pytest.raises(ServiceError, match="servers cannot start: KeyError: 'nothing'"):
        fork_servers(tmp_path, {"host-1": ["nothing"]})
    assert {*os.listdir(tmp_path)} == {"host-1.log", "host-2.log", RECORD}, "no id of this machine is kept"


def test_a_token_is_sent_to_two_routers_only_if_it_is_the_same(tmp_path: Path, state: Path) -> None:
    both = "127.0.0.1:1,127.0.0.1:2"
    make_own_token(tmp_path / "one", *both.split(","))
    assert own_token(both) == own_token("localhost:2") != ""
    assert not Keyring(tmp_path / "one").shared, "no places are reserved for other users"
    make_own_token(tmp_path / "other", "127.0.0.1:2")
    assert own_token(both) == ""
    assert own_token(f"{both},127.0.0.1:3") == ""
    make_own_token(tmp_path / "sixth", "[::1]:6", "localhost:7")
    assert own_token("[::1]:6") == own_token("localhost:6") == own_token("[::1]:7") != ""
    state.chmod(0o755)
    with pytest.raises(ServiceError, match="must belong to you, and nobody else may enter it"):
        own_token(both)


AS_NOBODY = f"""
import json, os, sys
from serving.cli.__main__ import main
from tests.serving.test_same_machine import codes
import serving.cli.deploy, serving.cli.generate, serving.cli.serve
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
router, host = sys.argv[1:]
commands = [["status"], ["generate", "x"], ["deploy", "--rollback"]]
print(json.dumps([codes(router, host), [main([*words, "--router", router]) for words in commands], os.getuid()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_this_machine_is_refused(bundles: Path, state: Path, onesweep: Run) -> None:
    port = free_port_block(3)
    router, host, http = (f"127.0.0.1:{port + i}" for i in range(3))
    up = ("up", "--detach", "--hosts", 1, "--checkpoint", bundles / "own", "--port", port, "--http", http)
    code, _, err = onesweep(*up)
    assert code == 0, err
    try:
        ran = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, router, host], capture_output=True, text=True, check=False
        )
        found, exit_codes, uid = json.loads(ran.stdout.splitlines()[-1])
        assert (uid, exit_codes) == (NOBODY, [2, 2, 2])
        assert ran.stderr.count("a token is required") == 3
        assert found == dict.fromkeys([*ROUTER_CALLS, *HOST_CALLS], "UNAUTHENTICATED")
        asked = {"model": "onesweep-ar", "prompt": "x", "max_tokens": 2}
        response = httpx.post(f"http://{http}/v1/completions", json=asked, headers={"authorization": "Bearer none"})
        assert response.status_code == 200, "the gateway lends its token to the page: see docs/security.md"
    finally:
        assert onesweep("down")[0] == 0
    assert not list(state.glob("*.token"))
