"""Deployments that cannot be started."""

from pathlib import Path

import pytest

from loadtest.workload.testbed import Network, ring_topology
from stages.errors import InputError


def test_more_nodes_than_blocks(bundle: Path) -> None:
    with pytest.raises(InputError, match="3 hosts cannot share 2 blocks"):
        ring_topology(Network("here", 3, 7700), bundle)
