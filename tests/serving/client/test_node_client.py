"""A client in another language, made from the contracts alone."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_health.v1 import health_pb2

from serving.cli.deployment import Deployment
from serving.client.client import Client
from stages.wire.tokens import own_token
from tests.conftest import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPT = "It was läte"
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
HERE, PROTOS = Path(__file__).parent, Path(__file__).parents[3] / "proto"


@pytest.fixture(scope="module")
def answers(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers that a client in node received."""
    if shutil.which("npm") is None:
        pytest.skip("there is no node with npm on this machine")
    folder = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    tried = "--prefer-offline", "--fetch-retries=0", "--fetch-timeout=20000"
    got = subprocess.run([*install, *tried], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if got.returncode:
        pytest.skip(f"no registry has the node packages: {got.stderr[-200:]}")
    descriptor = FileDescriptorSet()
    health_pb2.DESCRIPTOR.CopyToProto(descriptor.file.add())
    (folder / "health.bin").write_bytes(descriptor.SerializeToString())
    addresses = deployment.topology.router, deployment.topology.hosts[0].address
    command = ["node", str(HERE / "node_client.mjs"), str(folder), str(PROTOS), str(folder / "health.bin")]
    command += [*addresses, PROMPT, *map(own_token, addresses)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("mode", ["sweep", "ar"])
def test_a_node_client_reads_the_text_of_our_client(answers: dict[str, Any], client: Client, mode: str) -> None:
    own, other = client.generate(PROMPT, mode=mode, max_bytes=24, seed=5), answers[mode]
    assert other["code"] == grpc.StatusCode.OK.value[0]
    assert bytes.fromhex(other["text"]).decode(errors="replace") == own.text
    summary = other["summary"]
    assert (summary["mode"], summary["seed"], summary["sweeps"]) == (mode, "5", own.sweeps)
    assert len(summary["hosts"]) == len(own.hosts)
    assert (other["pieces"] > 1) == (mode == "ar"), "a stream comes in pieces"
