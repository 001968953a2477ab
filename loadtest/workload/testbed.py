"""The deployment under test: started on loopback, started in an emulated network, or found running.

    with open_network("links-60", 3) as network, deployed(network, checkpoint) as testbed:
        testbed.caller.ask([{"prompt": "The sea ", "mode": "sweep", "max_bytes": 32}])

Every benchmark and every fault test starts its processes here, so that each has the same guarantee: what it started
ends with it, even when it is killed.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.lab.lab import Lab, lab_problem, temporary_lab
from loadtest.lab.profile import ROUTER, Link, node_names, profile_named
from loadtest.workload.caller import COMMAND, Access, Caller
from serving.cli.deployment import POLL_S, Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.cli.servers import MODULE
from serving.router.request import DEFAULT_ROUTER
from serving.router.topology import SHIPPED, Topology, local_topology
from stages.errors import InputError, ServiceError
from stages.settings import setting
from stages.wire.channel import parse_address
from stages.wire.links import KINDS, RELAYED, REVERSED
from stages.wire.secret_files import state_directory

LOOPBACK = "loopback"  # the profile without a lab: every process on this machine, no link emulated
AS_FOUND = "as found"  # the profile of a deployment started elsewhere
DEFAULT_HOSTS = 3  # the fewest with a host that is neither first nor last
INSECURE, ANYBODY = "--insecure", "--anybody"  # a lab's addresses are not loopback, but nothing outside can reach them
# Benchmarks repeat the same prompts: a host with these in its prefix cache would not be measured at all.
NO_MEMORY = ("--set", "prefix_mb=0")
# Prefix of a command on loopback: the process ends with the thread that started it, like everything in a lab.
MORTAL = ("setpriv", "--pdeathsig", "KILL", "--")


@dataclass(frozen=True)
class Network:
    """Nodes to run processes in: those of a lab, or just this machine."""

    profile: str
    hosts: int
    first_port: int  # port of the node `router`; host i listens on the i-th port after it
    lab: Lab | None = None
    links: str = ""  # kind of the links between machines that joined; empty: a topology names the hosts

    @property
    def nodes(self) -> tuple[str, ...]:
        """`router`, `host-1`, ..."""
        return node_names(self.hosts)

    @property
    def options(self) -> tuple[str, ...]:
        """Options with which servers and clients can call each other here."""
        return (INSECURE,) if self.lab else ()

    def address(self, node: str) -> str:
        """The address of a node's server."""
        host = self.lab.address(node) if self.lab else "127.0.0.1"
        return f"{host}:{self.first_port + self.nodes.index(node)}"

    def command(self, node: str, argv: list[str]) -> list[str]:
        """The command that runs `argv` in a node and ends with the thread that starts it."""
        if self.lab:
            return self.lab.command(node, argv)
        return [*MORTAL, *argv] if shutil.which(MORTAL[0]) else argv

    def link(self, source: str, destination: str) -> Link:
        """The directed link between two nodes, by way of the router if it relays; loopback takes no time."""
        if self.lab is None:
            return Link()
        if self.links != RELAYED or ROUTER in (source, destination):
            return self.lab.profile.link(source, destination)
        ways = [self.lab.profile.link(source, ROUTER), self.lab.profile.link(ROUTER, destination)]
        rate_mbps = min((way.rate_mbps for way in ways if way.rate_mbps), default=None)
        return Link(sum(way.delay_ms for way in ways), rate_mbps, jitter_ms=sum(way.jitter_ms for way in ways))


@contextlib.contextmanager
def open_network(profile: str, hosts: int, links: str = "") -> Iterator[Network]:
    """Nodes for a router and `hosts` hosts during a `with` block. Raises OnesweepError.

    :param profile: of the links; LOOPBACK needs no lab.
    :param links: kind of links that joining machines find, in a ring in their order.
    """
    if profile == LOOPBACK:
        yield Network(LOOPBACK, hosts, free_port_block(hosts + 2))
        return
    found, names, port = profile_named(profile), node_names(hosts)[1:], parse_address(DEFAULT_ROUTER)[1]
    if links:
        # all kinds may be up at once, and this user's records of routers are keyed by address
        port += 10 * KINDS.index(links)
        # nothing dials a home, and no host the next one of the ring, which can dial its predecessor
        closed = {there: [here] for here, there in zip(names, (*names[1:], names[0]), strict=True)}
        found = replace(found, gateways=names * (links == RELAYED), closed=closed if links == REVERSED else {})
    with temporary_lab(found, hosts) as lab:
        yield Network(profile, hosts, port, lab, links)


@dataclass
class Testbed:
    """A router under test, its hosts, and the means to start programs next to it."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    access: Access
    network: Network
    caller: Caller  # a client process next to the router
    deployment: Deployment | None = None  # None for a deployment found running


@contextlib.contextmanager
def deployed(
    network: Network, checkpoint: Path, topology: Topology | None = None, *, second: str | None = None
) -> Iterator[Testbed]:
    """A ready deployment in a network during a `with` block.

    :param topology: None = a ring of all hosts. Its host i runs in the network's i-th host node, whatever its name.

    Raises OnesweepError with the last log lines of a process that ended.
    """
    if topology is None:
        plain = local_topology(network.hosts, block_count(checkpoint), checkpoint, network.first_port + 1)
        addresses = {host.name: network.address(host.name) for host in plain.hosts}
        hosts = [replace(host, address=addresses[host.name], listen=addresses[host.name]) for host in plain.hosts]
        topology = Topology(tuple(hosts), network.address(ROUTER), checkpoint)
    nodes = dict(zip((host.name for host in topology.hosts), network.nodes[1:], strict=False))
    access = Access(topology.router, insecure=network.lab is not None)
    with (
        contextlib.closing(Caller(network.command(ROUTER, COMMAND), access)) as caller,
        temporary_deployment(
            topology,
            checkpoint,
            answers=caller.answers(),
            place=lambda name, argv: network.command(nodes.get(name, ROUTER), argv),
            host_options=(*network.options, *NO_MEMORY),
            router_options=(*network.options, *([ANYBODY] if network.lab else [])),
            second=second,
        ) as deployment,
    ):
        yield Testbed(access, network, caller, deployment)


@contextlib.contextmanager
def joined(network: Network, checkpoint: Path) -> Iterator[Testbed]:
    """A ready deployment of machines that joined with a ticket, during a `with` block.

    Raises OnesweepError if one ends, or finds other links than the network's."""
    from stages.wire.link_quality import LinkRecord  # imports torch, which help can do without

    lab, nodes, port = network.lab, network.nodes[1:], network.first_port
    assert lab is not None, "loopback has no links"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        running = dict[str, subprocess.Popen[bytes]]()

        def start(node: str, *words: object) -> None:
            command = network.command(node, [sys.executable, *MODULE, *map(str, words)])
            own = {"XDG_STATE_HOME": str(directory / node), "ONESWEEP_STATE": str(state_directory())}  # the caller's
            with (directory / f"{node}.log").open("wb") as log:
                running[node] = process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | own)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        def served(pattern: str) -> str:
            """Wait for server output that matches, past or future."""
            while True:
                logs = {node: (directory / f"{node}.log").read_text(errors="replace") for node in running}
                if found := re.search(pattern, logs[ROUTER]):
                    return found[0]
                if ended := [node for node, process in running.items() if process.poll() is not None]:
                    raise ServiceError(f"{ended[0]} exited: {' '.join(logs[ended[0]].split()[-40:])}")
                time.sleep(POLL_S)

        at = ["--listen", f"{lab.address(ROUTER)}:{port + 2}", "--port", port, "--http", f"127.0.0.1:{port + 1}"]
        start(ROUTER, "serve", checkpoint, "--wait", len(nodes), *at)
        ticket = served(r"onesweep-[\w-]+")
        for node in nodes:  # one after the other, which sets their order in the ring
            start(node, "join", ticket, "--name", node, "--threads", 1)
            served(f"{node} is online")
        served("Ctrl-C stops them")
        run = directory / ROUTER / "onesweep" / "run"
        access = Access(f"127.0.0.1:{port}", str(run / "ca.pem"))
        caller = stack.enter_context(contextlib.closing(Caller(network.command(ROUTER, COMMAND), access)))
        caller.facts()
        kinds = LinkRecord.read(run).kinds
        if {kinds.get(pair) for pair in zip(nodes, (*nodes[1:], nodes[0]), strict=True)} != {network.links}:
            raise ServiceError(f"not all links are {network.links}: {kinds}")
        yield Testbed(access, network, caller)


@dataclass(frozen=True)
class TestbedSettings:
    """Settings that choose the deployment under test."""

    __test__ = False

    profile: str = setting(LOOPBACK, "network profile; loopback needs no root", metavar="P")
    access: Access | None = None  # to a running deployment; None = start one
    checkpoint: Path | None = setting(None, "bundle to serve", metavar="DIR", shown="the shipped weights")
    hosts: int | None = setting(None, "hosts that share the blocks", shown="3")

    @property
    def bundle(self) -> Path:
        return (self.checkpoint or SHIPPED).resolve()

    @property
    def host_count(self) -> int:
        return default_hosts(self.bundle) if self.hosts is None else self.hosts


def block_count(checkpoint: Path) -> int:
    """Blocks or AR stages of a checkpoint. Raises CheckpointError."""
    from stages.host.plan import plan_host  # imports numpy, which help can do without

    return plan_host(checkpoint, (0,)).parts


def default_hosts(checkpoint: Path) -> int:
    """Three, or one per block if there are fewer."""
    return min(DEFAULT_HOSTS, block_count(checkpoint))


def check_network(profile: str, hosts: int, checkpoint: Path, links: Sequence[str] = ()) -> None:
    """Raise OnesweepError if this many hosts cannot share the blocks, or a profile's links cannot join them."""
    local_topology(hosts, block_count(checkpoint), checkpoint)
    if links and (profile == LOOPBACK or (REVERSED in links and hosts < DEFAULT_HOSTS)):
        raise InputError(f"--links needs a profile with links, and {REVERSED} at least {DEFAULT_HOSTS} hosts")
    check_links(profile, hosts, may_join=bool(links))


def check_links(profile: str, hosts: int, may_join: bool = False) -> None:
    """Raise OnesweepError if a profile's links between this many hosts cannot be emulated here."""
    if profile != LOOPBACK:
        (found := profile_named(profile, LOOPBACK)).check_hosts(hosts)
        if (found.gateways or found.closed) and not may_join:
            raise InputError(f"the hosts of {profile} cannot be dialled: use it with `onesweep join` or --links")
        if problem := lab_problem():
            raise ServiceError(f"{problem}; --profile {LOOPBACK} needs no lab, but has no links")


@contextlib.contextmanager
def open_testbed(settings: TestbedSettings) -> Iterator[Testbed]:
    """The ready deployment; stops at the end whatever it started. Raises OnesweepError."""
    if settings.access is not None:
        network = Network(AS_FOUND, 0, 0)
        with contextlib.closing(Caller(network.command(ROUTER, COMMAND), settings.access)) as caller:
            yield Testbed(settings.access, network, caller)
        return
    with open_network(settings.profile, settings.host_count) as network, deployed(network, settings.bundle) as testbed:
        yield testbed


def check_testbed(settings: TestbedSettings) -> None:
    """Refuse impossible settings before anything is started. Raises OnesweepError."""
    if settings.access is not None:
        if settings != TestbedSettings(access=settings.access):
            raise InputError("--router names a running deployment: omit --hosts, --checkpoint and --profile")
        return
    check_network(settings.profile, settings.host_count, settings.bundle)
