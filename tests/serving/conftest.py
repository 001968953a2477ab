"""A deployment of real processes for the tests that only ask it for text, and one to break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from serving.cli import main
from serving.client import Client
from serving.deployment import Deployment, free_port_block, temporary_deployment
from serving.topology import local_topology
from stages.transport import open_blocking_channel
from stages.v1 import stage_pb2, stage_pb2_grpc


@contextmanager
def deployed(checkpoint: Path) -> Iterator[Deployment]:
    topology = local_topology(3, 3, checkpoint, free_port_block(4) + 1)
    with temporary_deployment(topology, checkpoint) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def deployment(bundles: Path) -> Iterator[Deployment]:
    """Three hosts and a router as processes. Not to be harmed."""
    with deployed(bundles / "own") as running:
        yield running


@pytest.fixture(scope="module")
def victim(bundles: Path) -> Iterator[Deployment]:
    """The same, for one module to break and mend."""
    with deployed(bundles / "own") as running:
        yield running


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.topology.router) as opened:
        yield opened


@pytest.fixture
def describe() -> Callable[[str], stage_pb2.DescribeResponse]:
    """What the host at an address says of itself."""

    def ask(address: str) -> stage_pb2.DescribeResponse:
        with open_blocking_channel(address) as channel:
            return stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=5)

    return ask


@pytest.fixture
def sessions(describe: Callable[[str], stage_pb2.DescribeResponse]) -> Callable[[Deployment], int]:
    """Sessions open on all hosts of a deployment that answer."""

    def count(deployment: Deployment) -> int:
        total = 0
        for host in deployment.topology.hosts:
            try:
                total += describe(host.address).counters.sessions
            except grpc.RpcError:
                continue
        return total

    return count


@pytest.fixture
def onesweep(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run
