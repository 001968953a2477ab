"""A small deployment under load, and its expected texts."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadtest.load.plan import LoadSettings
from loadtest.workload.caller import COMMAND, Access, Caller
from loadtest.workload.prompts import seeded_prompts
from loadtest.workload.testbed import Network, Testbed, TestbedSettings
from loadtest.workload.texts import Texts
from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.router.topology import local_topology

MAX_BYTES = 16
CONTEXT_BYTES = 96


@pytest.fixture(scope="session")
def deployment(bundle: Path) -> Iterator[Deployment]:
    """Two hosts and a router that takes three requests at once, and soon reports a lost host."""
    topology = local_topology(2, 2, bundle, free_port_block(3) + 1)
    options = ("--max-requests", "3", "--set", "queue_limit=0", "--set", "hop_timeout_s=2")
    with temporary_deployment(topology, bundle, router_options=options) as deployed:
        yield deployed


@pytest.fixture
def target(deployment: Deployment, bundle: Path, locust: None) -> Iterator[Testbed]:
    access = Access(deployment.topology.router)
    with contextlib.closing(Caller(COMMAND, access)) as caller:
        yield Testbed(access, Network("loopback", 2, 0), caller, deployment)


@pytest.fixture
def texts(target: Testbed) -> Texts:
    return Texts(target, seeded_prompts(6, 0, MAX_BYTES, CONTEXT_BYTES), MAX_BYTES)


@pytest.fixture
def settings(bundle: Path) -> Callable[..., LoadSettings]:
    """Settings of a run of a second or two."""

    def make(**changes: object) -> LoadSettings:
        chosen = {"seconds": 1.5, "warm_up_s": 0.3, "max_bytes": MAX_BYTES, "cases": 6, "timeout_s": 20.0, **changes}
        return LoadSettings(TestbedSettings(checkpoint=bundle), **chosen)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a deployment, or of a load generator's process, take seconds."""
    for item in items:
        if {"deployment", "wordless"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
