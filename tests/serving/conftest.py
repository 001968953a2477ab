"""A deployment of real processes for the tests that only ask it for text, and one to break."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import local_topology
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import open_blocking_channel
from stages.wire.status import Metadata
from stages.wire.tokens import own_token, token_metadata
from tests.serving.releases import REQUESTS, Texts, answer, composed


@contextmanager
def deployed(checkpoint: Path, *router: str) -> Iterator[Deployment]:
    topology = local_topology(3, 3, checkpoint, free_port_block(4) + 1)
    seldom = ("--set", "keep_warm_s=0.5")  # it is idle for most of the tests, and each message takes time from them
    with temporary_deployment(
        topology, checkpoint, host_options=seldom, router_options=[*seldom, *router]
    ) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def deployment(bundles: Path) -> Iterator[Deployment]:
    """Three hosts and a router as processes. Not to be harmed."""
    with deployed(bundles / "own") as running:
        yield running


@pytest.fixture(scope="module")
def caller(doubles: Deployment) -> Iterator[Client]:
    with Client(doubles.topology.router) as client:
        yield client


@pytest.fixture(scope="module")
def victim(bundles: Path) -> Iterator[Deployment]:
    """The same, for one module to break and mend; lost hosts are waited for a second."""
    with deployed(bundles / "own", "--set", "hop_timeout_s=1") as running:
        yield running


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.topology.router) as opened:
        yield opened


def shown(address: str) -> Metadata:
    """Metadata for a call to a deployment's server without our client."""
    return token_metadata(own_token(address))


def describe(address: str) -> stage_pb2.DescribeResponse:
    """The host's description of itself."""
    with open_blocking_channel(address) as channel:
        asked = stage_pb2.DescribeRequest()
        return stage_pb2_grpc.StageServiceStub(channel).Describe(asked, timeout=5, metadata=shown(address))


def sessions(deployment: Deployment) -> int:
    """Sessions open on all hosts of a deployment that answer."""
    total = 0
    for host in deployment.topology.hosts:
        try:
            total += describe(host.address).counters.sessions
        except grpc.RpcError:
            continue
    return total


# Releases


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the state of deployments."""
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture(scope="session")
def old(bundles: Path) -> Path:
    return bundles / "scored"


@pytest.fixture(scope="session")
def new(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return composed(tmp_path_factory.mktemp("new"), bundles / "other", scorer=bundles / "own" / "ar")


@pytest.fixture(scope="session")
def texts(old: Path, new: Path, local_ring: Any) -> dict[str, Texts]:
    """Texts of hosts that have only one release."""
    written = {}
    for name, bundle in (("old", old), ("new", new)):
        with local_ring(bundle, 3) as client:
            written[name] = {key: answer(client, key) for key in REQUESTS}
    assert all(written["old"][key] != written["new"][key] for key in REQUESTS)
    return written
