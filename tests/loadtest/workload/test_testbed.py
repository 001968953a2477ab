"""Deployments that cannot be started."""

from pathlib import Path

import pytest

from loadtest.workload.testbed import Network, deployed, ring_topology
from serving.cli.ports import free_port_block
from stages.errors import InputError, ServiceError


@pytest.mark.slow
def test_a_flag_that_is_refused_is_the_last_word(bundle: Path) -> None:
    with (
        pytest.raises(ServiceError, match=r"router ended: no option --no-such-flag; see"),
        deployed(Network("here", 2, free_port_block(3)), bundle, router_options=("--no-such-flag",)),
    ):
        pytest.fail("it started")


def test_more_nodes_than_blocks(bundle: Path) -> None:
    with pytest.raises(InputError, match="3 hosts cannot share 2 blocks"):
        ring_topology(Network("here", 3, 7700), bundle)
