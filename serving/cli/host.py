"""`onesweep host`: one block host, in its place of a topology."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.router.topology import HostEntry, Topology
from serving.router.topology_source import TopologySource, add_topology_option, follow_topology, topology_at
from stages.errors import InputError
from stages.host.settings import FollowNext, HostSettings, StageSettings
from stages.settings import add_flags, from_flags
from stages.telemetry.observability import start_log
from stages.wire.flags import add_server_options
from stages.wire.tls import security_of

log = logging.getLogger(__name__)


def add_host(host: argparse.ArgumentParser) -> None:
    host.add_argument("name", metavar="NAME", help="its name in the topology, accounts and errors")
    add_topology_option(host)
    host.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint or bundle (the topology's)")
    add_flags(host, HostSettings)
    add_flags(host, StageSettings)
    add_server_options(host)


def run_host(options: argparse.Namespace) -> int:
    from stages.host.server import serve

    settings = host_settings(options)
    start_log(settings.seeing.log_format, settings.host.name)
    serve(settings)
    return 0


def host_settings(options: argparse.Namespace) -> StageSettings:
    """A host in its place of the topology, which it follows. Raises OnesweepError."""
    source = topology_at(options.topology, options.insecure)
    topology = source.read()
    host = topology.host(options.name)
    checkpoint = options.checkpoint or topology.checkpoint
    if checkpoint is None:
        raise InputError(f"{source} names no checkpoint: add one, or give --checkpoint")
    options.device = options.device or host.device or None  # empty where a script has none to name
    return from_flags(
        StageSettings,
        options,
        checkpoint=checkpoint,
        blocks=host.blocks,
        parts=topology.blocks,
        listen=host.listen,
        next=tuple(topology.successors(host)),
        host=from_flags(HostSettings, options, name=host.name),
        security=security_of(options, topology.tls_of(host.name)),
        follow_next=_next_hosts(source, topology, host),
    )


def _next_hosts(source: TopologySource, topology: Topology, host: HostEntry) -> FollowNext:
    """Follow the topology for the hosts that may come after `host`, as long as it has `host` in its place."""
    own = topology.blocks, host.blocks, host.listen

    async def follow(set_addresses: Callable[[Sequence[str]], None]) -> None:
        def use(changed: Topology) -> None:
            places = [each for each in changed.hosts if each.name == host.name]
            if [(changed.blocks, place.blocks, place.listen) for place in places] != [own]:
                raise InputError(
                    f"{source} no longer has {host.name} with blocks {host.span} of {topology.blocks} at {host.listen} "
                    "as this process runs: start it anew, or stop it if another took its place"
                )
            addresses = changed.successors(places[0])
            log.info("%s: next hosts: %s", host.name, ", ".join(addresses) or "none")
            set_addresses(addresses)

        await follow_topology(source, topology, use)

    return follow
