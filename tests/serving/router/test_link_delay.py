"""Delay that a request adds to every hop of a ring on one machine."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.client.client import Client, RequestRefused
from serving.router.server import run_router
from serving.router.settings import RouterSettings
from serving.router.topology import Topology, local_topology
from stages.errors import InputError
from stages.limits import MAX_LINK_MS
from stages.wire.tls import Security
from tests.conftest import wait_ready

PROMPT = "The sea was calm. The sea was "
HOSTS, DELAY_MS = 3, 15
COUNT = 6


@pytest.mark.parametrize("mode", ["sweep", "chunked", "ar", "ar-speculative", "local"])
def test_every_hop_takes_the_delay_and_the_text_is_the_same(client: Client, mode: str) -> None:
    asked: dict[str, Any] = {"mode": mode, "max_bytes": COUNT, "seed": 4}
    near, far = client.generate(PROMPT, **asked), client.generate(PROMPT, **asked, link_ms=DELAY_MS)
    assert far.output == near.output
    # a sweep goes to each host and back to the router; a byte of `ar` goes on from the last host to the first
    hops = HOSTS * COUNT + 1 if mode == "ar" else (HOSTS + 1) * far.sweeps
    assert far.latency_ms >= hops * DELAY_MS - 0.01
    assert client.generate(PROMPT, **asked, link_ms=0).output == near.output


def test_a_client_refuses_what_is_out_of_bounds(client: Client) -> None:
    assert MAX_LINK_MS == MAX_LINK_MS
    with pytest.raises(InputError, match=f"link_ms must be a whole number from 0 to {MAX_LINK_MS}, not 501"):
        client.generate(PROMPT, link_ms=501)
    assert client.status().link_ms_limit == MAX_LINK_MS


def test_a_router_that_others_reach_adds_no_delay(bundles: Path, servers: Any) -> None:
    topology = local_topology(HOSTS, HOSTS, bundles / "own", free_port_block(HOSTS + 1) + 1)
    servers.hosts(topology, bundles / "own")
    port = topology.router.rpartition(":")[2]
    security = Security(insecure=True)
    open_to_all = RouterSettings(topology, f"0.0.0.0:{port}", bundles / "own", security=security, anybody=True)
    servers.run(lambda stop: run_router(open_to_all, stop))
    wait_ready(topology.router)
    check_refused(topology)


def check_refused(topology: Topology) -> None:
    with Client(topology.router) as client:
        assert client.status().link_ms_limit == 0
        with pytest.raises(RequestRefused, match="link_ms adds delay to a ring that is all on one machine") as caught:
            client.generate(PROMPT, max_bytes=4, link_ms=5)
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert client.generate(PROMPT, max_bytes=4, link_ms=0).output_bytes == 4
