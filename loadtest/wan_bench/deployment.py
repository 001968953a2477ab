"""A deployment whose processes are the nodes of a lab."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from loadtest.wan.lab import Lab
from loadtest.wan.profile import ROUTER
from serving.deployment import Deployment, temporary_deployment
from serving.topology import DEFAULT_ROUTER, Topology, local_topology
from stages.parts import plan_host
from stages.transport import parse_address

FIRST_PORT = parse_address(DEFAULT_ROUTER)[1]
INSECURE = "--insecure"
"""The lab's addresses are not loopback, and nobody else can reach them."""


def lab_topology(lab: Lab, checkpoint: Path, first_port: int = FIRST_PORT) -> Topology:
    """A ring of all hosts of the lab in their order. Raises InputError when there are more hosts than blocks."""
    names = [node for node in lab.nodes if node != ROUTER]
    plain = local_topology(len(names), plan_host(checkpoint, (0,)).parts, checkpoint, first_port + 1)
    entries = []
    for name, entry in zip(names, plain.hosts, strict=True):
        address = f"{lab.address(name)}:{parse_address(entry.address)[1]}"
        entries.append(replace(entry, name=name, address=address, listen=address))
    return Topology(tuple(entries), f"{lab.address(ROUTER)}:{first_port}", checkpoint)


@contextlib.contextmanager
def deployed(
    lab: Lab,
    checkpoint: Path,
    host_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    threads: int = 1,
    first_port: int = FIRST_PORT,
) -> Iterator[Deployment]:
    """A ready deployment: each host, and the router, in the lab's node of its name.

    Its `topology` has the addresses inside the lab, its `processes` the process ids. It ends with the `with` block,
    and with this process however that ends.

    :param first_port: the router's; hosts take those after it. Two deployments in one lab need ports of their own.

    Raises OnesweepError with the last words of a process that ended.
    """
    with temporary_deployment(
        lab_topology(lab, checkpoint, first_port),
        checkpoint,
        threads,
        place=lab.command,
        host_options=(INSECURE, *host_options),
        router_options=(INSECURE, *router_options),
    ) as deployment:
        yield deployment
