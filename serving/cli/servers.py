"""The servers of a deployment on this machine: the arguments of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serving.router.topology import HostEntry, Topology
from stages.wire.channel import is_loopback
from stages.wire.tls import tls_arguments
from stages.wire.tokens import make_own_token

ROUTER, HTTP = "router", "http"  # what the processes of the router and the gateway are called
TOPOLOGY, RELEASES = "topology.toml", "releases"


def server_arguments(
    topology: Topology,
    checkpoint: Path,
    directory: Path,
    threads: int = 1,
    *,
    host_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    http: str | None = None,
    hosts_run: bool = False,
    second: str | None = None,
) -> dict[str, list[str]]:
    """Arguments of `onesweep` by the name of the process, the hosts first. Makes their own tokens.

    :param directory: has the file TOPOLOGY, and the folder RELEASES.
    :param host_options: more options of every `onesweep host`, such as ("--insecure",).
    :param router_options: more options of `onesweep router`.
    :param http: where a gateway listens, too.
    :param hosts_run: the hosts are up elsewhere: only the router and the gateway are started.
    :param second: where a second router listens, which deploys nothing; its name is its address.
    """
    releases, found = directory / RELEASES, dict[str, list[str]]()
    for host in () if hosts_run else topology.hosts:
        own = ["--shelf", str(releases / host.name), *host_options]
        found[host.name] = [*_host_arguments(topology, host, checkpoint, threads), *own]
        found[host.name] += _guard(directory / f"{host.name}.tokens", found[host.name], host.address, host.listen)
    router = ["router", "--topology", str(directory / TOPOLOGY), "--checkpoint", str(checkpoint)]
    router += ["--threads", str(threads), *router_options]
    router += _guard(directory / f"{ROUTER}.tokens", router, topology.router, *([second] if second else []))
    found[ROUTER] = [*router, "--shelf", str(releases / ROUTER)]
    if second is not None:
        found[second] = [*router, "--listen", second]
    if http is not None:
        found[HTTP] = ["http", "--listen", http, "--router", topology.router, *tls_arguments(topology.client_tls)]
    return found


def _guard(path: Path, arguments: Sequence[str], *addresses: str) -> list[str]:
    """The option that has a server on this machine ask for its own token, where no other says who may ask it."""
    if {"--tokens", "--anybody", "--tls-cert"} & {*arguments} or not all(map(is_loopback, addresses)):
        return []
    make_own_token(path, *addresses)
    return ["--tokens", str(path)]


def _host_arguments(topology: Topology, host: HostEntry, checkpoint: Path, threads: int) -> list[str]:
    from stages.checkpoint.bundle import has_experts  # torch, which other commands need not wait for

    successors = topology.successors(host, has_experts(checkpoint))
    return [
        *("host", host.name, "--checkpoint", str(checkpoint), "--blocks", host.span),
        *("--listen", host.listen, "--threads", str(threads)),
        *(("--next", ",".join(successors)) if successors else ()),
        *(("--device", host.device) if host.device else ()),
        *tls_arguments(topology.tls_of(host.name)),
    ]
