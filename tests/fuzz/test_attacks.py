"""HTTP/2 attacks with raw frames: a request beside them gets the right text, and every process lives."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import local_topology
from tests.fuzz import attacker

SECONDS = 1.0
ASKED = {"mode": "ar", "max_tokens": 8, "seed": 5, "timeout_s": 60.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_requests_survive_attacks(bundles: Path) -> None:
    topology = local_topology(3, 3, bundles / "own", free_port_block(4) + 1)
    targets = {
        topology.router: "/serving.v1.RouterService/Generate",
        topology.hosts[0].listen: "/stages.v1.StageService/Push",
    }
    with (
        temporary_deployment(topology, bundles / "own", router_options=["--anybody"]) as deployment,
        Client(topology.router) as client,
    ):
        expected = client.generate("The old man", **ASKED).output
        for attack in attacker.ATTACKS:
            for address, path in targets.items():
                command = [sys.executable, attacker.__file__, attack, address, path, str(SECONDS), "4"]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
                    assert client.generate("The old man", **ASKED).output == expected
                    sent = json.loads(run.communicate()[0])["sent"]
                assert sent, attack
        assert all(psutil.pid_exists(pid) for pid in deployment.processes.values())
