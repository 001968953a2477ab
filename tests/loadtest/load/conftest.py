"""A small deployment under load, and its expected texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtest.load.access import Access
from loadtest.load.prompts import Case, make_cases
from loadtest.load.run import LoadSettings
from loadtest.load.target import Target, TargetSettings
from loadtest.load.texts import Texts
from serving.deployment import Deployment, temporary_deployment
from serving.ports import free_port_block
from serving.topology import local_topology

MAX_BYTES = 16
CONTEXT_BYTES = 96


@pytest.fixture(scope="session")
def locust() -> None:
    if find_spec("locust") is None:
        pytest.skip("locust is not installed (extra `loadtest`)")


@pytest.fixture(scope="session")
def request_limit() -> int:
    """Requests that the router of `deployment` takes at once."""
    return 3


@pytest.fixture(scope="session")
def cases() -> tuple[Case, ...]:
    return make_cases(6, 0, MAX_BYTES, CONTEXT_BYTES)


@pytest.fixture(scope="session")
def deployment(bundle: Path, request_limit: int) -> Iterator[Deployment]:
    """Two hosts and a router that takes `request_limit` requests at once, and soon says that a host is gone."""
    topology = local_topology(2, 2, bundle, free_port_block(3) + 1)
    options = ("--max-requests", str(request_limit), "--max-waiting", "0", "--hop-timeout-s", "2")
    with temporary_deployment(topology, bundle, router_options=options) as deployed:
        yield deployed


@pytest.fixture
def target(deployment: Deployment, bundle: Path, locust: None) -> Target:
    return Target(Access(deployment.topology.router), "loopback", bundle)


@pytest.fixture
def texts(target: Target, cases: tuple[Case, ...]) -> Texts:
    return Texts(target, cases, MAX_BYTES)


@pytest.fixture
def settings(bundle: Path) -> Callable[..., LoadSettings]:
    """Settings of a run of a second or two."""

    def make(**changes: object) -> LoadSettings:
        chosen = {"seconds": 1.5, "warm_up_s": 0.3, "max_bytes": MAX_BYTES, "cases": 6, "timeout_s": 20.0, **changes}
        return LoadSettings(TargetSettings(checkpoint=bundle), **chosen)

    return make
