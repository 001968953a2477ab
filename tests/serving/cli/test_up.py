"""`up`, `status`, `down`: servers started here are stopped here."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from serving.cli.deployment import Deployment, find_deployment, running_deployments
from serving.cli.ports import free_port_block
from serving.cli.servers import MODULE, RECORD
from serving.client.client import Client
from serving.router.topology import local_topology
from stages.errors import ServiceError
from stages.wire.tokens import own_token_paths
from tests.conftest import PATIENCE_S, Run, until

pytestmark = pytest.mark.slow


@pytest.fixture
def port() -> int:
    return free_port_block(4)


@pytest.fixture(autouse=True)
def nothing_left(state: Path) -> Iterator[None]:
    yield
    left = []
    with contextlib.suppress(ServiceError):
        left = running_deployments()
    for deployment in left:
        deployment.stop()
    assert not left, "a test left its deployment running"


def taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_deployment_is_started_shown_and_stopped(bundles: Path, state: Path, port: int, onesweep: Run) -> None:
    up = ["up", "--detach", "--hosts", 1, "--port", port, "--checkpoint", bundles / "own"]
    code, out, err = onesweep(*up)
    assert (code, "does not answer" in err) == (0, False), err
    assert out.splitlines()[0].split() == ["host-1", f"127.0.0.1:{port + 1}", "blocks", "0,1,2"]
    assert "ready; logs in" in out
    assert state.stat().st_mode & 0o777 == 0o700
    processes = [
        psutil.Process(pid)
        for pid in json.loads((state / f"127.0.0.1:{port}" / "deployment.json").read_text())["processes"].values()
    ]

    code, out, _ = onesweep("status")
    assert (code, "router ready" in out) == (0, True), out
    code, out, _ = onesweep("status", "--json")
    (host,) = json.loads(out)["hosts"]
    assert host["name"] == "host-1"
    assert isinstance(host["queue_limit"], int), "protobuf's own JSON has such numbers as text"
    code, out, _ = onesweep("doctor")
    assert code == 0, out
    assert "host-1" in out
    code, out, err = onesweep("generate", "The ", "--max-bytes", 8, "--mode", "local")
    assert code == 0
    assert err.startswith("[local, seed 0, temperature 0.8: 8 bytes, 0 sweeps, 0 hops, 0 bytes on the wire")
    assert onesweep("generate", "The ", "--max-bytes", 8, "--mode", "local")[1] == out

    code, _, err = onesweep(*up)
    assert (code, f"a deployment is already up (router 127.0.0.1:{port}, in" in err) == (1, True), err

    up[5], second = port + 2, f"127.0.0.1:{port + 2}"
    assert onesweep(*up)[0] == 0
    for command in (["down"], ["status"], ["doctor"]):
        code, _, err = onesweep(*command)
        assert (code, "several routers are up: name one with --router" in err, second in err) == (2, True, True)
    assert onesweep("status", "--router", second)[0] == 0
    assert onesweep("doctor", "--topology", state / second / "topology.toml")[0] == 0
    assert onesweep("down", "--router", f"localhost:{port + 2}")[1] == f"stopped 2 servers of the router at {second}\n"
    assert onesweep("down", "--router", second)[0] == 1

    processes[0].kill()
    assert "\nhost-1 exited: killed without a message: perhaps it needs more memory" in onesweep("status")[1]
    remedy = "it runs (if `up` started it: `onesweep down`, then the same `onesweep up` again)"
    for asked in (("--mode", "sweep"), ("--budget-ms", 9)):
        code, _, err = onesweep("generate", "The ", *asked)
        assert (code, remedy in err) == (1, True), err
    assert onesweep("down")[:2] == (0, f"stopped 1 server of the router at 127.0.0.1:{port}\n")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert not any(map(taken, (port, port + 1)))
    code, _, err = onesweep("down")
    assert (code, "nothing is up" in err) == (1, True), err


def test_up_with_certificates_and_tokens(
    bundles: Path, port: int, tmp_path: Path, onesweep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates, tokens = tmp_path / "certs", tmp_path / "tokens.toml"
    assert onesweep("certs", "init", "--dir", certificates)[0] == 0
    for role, name in (("router", "router"), ("host", "host-1")):
        assert onesweep("certs", "issue", role, name, "--dir", certificates, "--address", "127.0.0.1")[0] == 0
    token = onesweep("token", "add", "ann", "--tokens", tokens)[1].strip()
    plain = local_topology(1, 3, bundles / "own", port + 1)
    (topology := tmp_path / "ring.toml").write_text(replace(plain, certificates=certificates).to_toml())
    code, _, err = onesweep("up", "--detach", "--topology", topology, "--tokens", tokens, "--device", "cpu")
    assert code == 0, err
    try:
        code, _, err = onesweep("status")
        assert (code, "token" in err) == (2, True), err
        monkeypatch.setenv("ONESWEEP_TOKEN", token)
        assert "router ready" in onesweep("status")[1]
        assert onesweep("generate", "The ", "--max-bytes", 8)[0] == 0
        assert onesweep("status", "--router", f"127.0.0.1:{port}", "--tls-ca", tmp_path / "none.pem")[0] == 2
        assert onesweep("doctor")[0] == 0
    finally:
        assert onesweep("down")[0] == 0


def test_up_in_the_foreground_restarts_a_replica_and_stops_on_ctrl_c(bundles: Path, state: Path, port: int) -> None:
    arguments = ["up", "--hosts", "1", "--replicas", "2", "--port", str(port), "--checkpoint", str(bundles / "own")]
    with subprocess.Popen(
        [sys.executable, *MODULE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as command:
        try:
            assert "Ctrl-C stops them.\n" in command.stdout
            pid = json.loads((state / f"127.0.0.1:{port}" / "deployment.json").read_text())["processes"]["host-1-1"]
            os.kill(pid, signal.SIGKILL)
            with Client(f"127.0.0.1:{port}") as client:
                assert client.generate("The ", mode="ar", max_bytes=20).output_bytes == 20
            assert command.stdout.readline() == "host-1-1 exited and is being restarted; see its log\n"
            command.send_signal(signal.SIGINT)
            rest = command.communicate(timeout=PATIENCE_S)[0]
        finally:
            command.terminate()
        assert command.returncode == 0, rest
    assert "Traceback" not in rest
    assert not any(taken(port + offset) for offset in range(3))
    assert not [*state.glob("*/deployment.json")]


def test_ctrl_c_while_servers_start_stops_them(
    bundles: Path, state: Path, port: int, onesweep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    monkeypatch.setattr("serving.cli.servers.FORKED", ["-c", starting])
    code, out, err = onesweep("up", "--hosts", 1, "--port", port, "--checkpoint", bundles / "own")
    assert (code, out, "the router finishes its requests first" in err) == (130, "", True), err


def test_a_signal_while_servers_stop_kills_the_rest(
    bundles: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = list[str]()
    monkeypatch.setattr("serving.cli.deployment._end", lambda processes: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(Deployment, "kill", lambda self, name: killed.append(name))
    topology, record = local_topology(1, 3, bundles / "own"), state / RECORD
    state.mkdir(mode=0o700)
    own_token_paths(topology.router)[0].mkdir()  # cannot be removed, as on a read-only disk
    record.touch()
    Deployment(topology, state, {"router": 1 << 30}).stop()
    assert (killed, record.exists()) == (["router", "router"], False)


# Ownership of directories and processes


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '{"processes": 5}', '{"processes": {"router": "x"}}'])
def test_an_invalid_deployment_record_is_ignored(state: Path, bundles: Path, record: str) -> None:
    state.mkdir(mode=0o700)
    (state / "topology.toml").write_text(local_topology(1, 3, bundles / "own").to_toml())
    (state / "deployment.json").write_text(record)
    assert find_deployment(state) is None


def test_a_process_id_reused_by_another_program_is_not_killed(state: Path, bundles: Path) -> None:
    state.mkdir(mode=0o700)
    topology = local_topology(1, 3, bundles / "own")
    (state / "topology.toml").write_text(topology.to_toml())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        until(psutil.Process(stranger.pid).cmdline)  # a program in the moment of its start could be a host
        (state / "deployment.json").write_text(json.dumps({"processes": {"router": stranger.pid, "host-1": 1 << 30}}))
        assert find_deployment(state) is None
        Deployment(topology, state, {"router": stranger.pid}).stop()
        time.sleep(0.1)
        assert stranger.poll() is None
        stranger.kill()
