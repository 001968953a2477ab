"""A deployment to break: every block on two hosts, in a lab or on loopback."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.chaos.clients import Clients
from loadtest.chaos.crowd import Order
from loadtest.chaos.second import make_second
from loadtest.load.target import LOOPBACK
from loadtest.wan.lab import Lab, temporary_lab
from loadtest.wan.profile import ROUTER, profile_named
from loadtest.wan_bench.deployment import FIRST_PORT, INSECURE
from serving.deployment import MODULE, Deployment, temporary_deployment
from serving.ports import free_port_block
from serving.topology import HostEntry, Topology
from stages.errors import ServiceError
from stages.parts import plan_host

REPLICAS = 2
LETTERS = "ab"
LIAR = "loadtest.chaos.liar"
STOP_S = 5.0
COMMAND_S = 120.0


@dataclass
class Stand:
    """A running deployment, and what takes the place of its parts for a while."""

    deployment: Deployment
    lab: Lab | None = None
    """None on loopback: there is no link to cut."""
    flood_order: Order | None = None
    """What a flood asks for."""
    impostors: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    floods: list[Clients] = field(default_factory=list)
    second: Path | None = None
    """Another release, once it was made."""

    @property
    def router(self) -> str:
        return self.deployment.topology.router

    @property
    def hosts(self) -> list[str]:
        return [host.name for host in self.deployment.topology.hosts]

    @property
    def links(self) -> list[str]:
        """What a request can go over, by the names of both ends."""
        topology, first = self.deployment.topology, self.deployment.topology.hosts[0].blocks
        ends = [(ROUTER, host.name) for host in topology.hosts]
        ends += [(a.name, b.name) for a in topology.hosts for b in topology.hosts if a.blocks == first != b.blocks]
        return [f"{one} - {other}" for one, other in ends]

    def beside(self, command: list[str]) -> list[str]:
        """A command that runs where the router does, and ends with this process."""
        return self.lab.command(ROUTER, command) if self.lab else command

    def set_cut(self, link: str, cut: bool) -> None:
        """Cut a link of `links`, or mend it."""
        assert self.lab is not None
        one, other = (self.node(name) for name in link.split(" - "))
        self.lab.set_cut(one, other, cut)

    def node(self, name: str) -> str:
        """The lab's node that a process is in."""
        return node_of(name, self.hosts)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process of the deployment, if it still is the one that has this number."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.deployment.processes[name])
            if name in process.cmdline():
                process.send_signal(number)

    def replace(self, name: str) -> None:
        """Put a liar in a host's place."""
        self.deployment.kill(name)
        command = self.deployment.commands[name]
        at = command.index(MODULE[-1])
        with (self.deployment.directory / f"{name}-liar.log").open("ab") as log:
            self.impostors[name] = subprocess.Popen(
                [*command[:at], LIAR, *command[at + 1 :]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def restore(self, name: str) -> None:
        """Put the host in its place again."""
        self._end(self.impostors.pop(name))
        self.deployment.revive(name)

    def flood(self, begin: bool) -> None:
        """Start another crowd, or have the last one begin no more requests."""
        assert self.flood_order is not None
        if begin:
            self.floods.append(Clients(self.flood_order, self.beside))
        else:
            self.floods[-1].stop()

    def deploy(self) -> None:
        """Exchange the weights for those of a second release. Raises ServiceError."""
        if self.second is None:
            checkpoint = self.deployment.topology.checkpoint
            assert checkpoint is not None
            self.second = make_second(checkpoint, self.deployment.directory / "second")
        self._onesweep("deploy", str(self.second))

    def roll_back(self) -> None:
        """Go back to the first. Raises ServiceError."""
        self._onesweep("deploy", "--rollback")

    def _onesweep(self, *arguments: str) -> None:
        """Run a command beside the router. Raises ServiceError when it fails."""
        command = [sys.executable, *MODULE, *arguments, "--router", self.router, INSECURE]
        done = subprocess.run(self.beside(command), capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode:
            raise ServiceError(f"`onesweep {' '.join(arguments)}` failed: {done.stderr.strip()}")

    def close(self) -> None:
        for clients in self.floods:
            clients.close()
        for impostor in self.impostors.values():
            self._end(impostor)

    @staticmethod
    def _end(impostor: subprocess.Popen[bytes]) -> None:
        impostor.kill()
        impostor.wait(STOP_S)


def doubled(checkpoint: Path, addresses: Sequence[str], router: str) -> Topology:
    """The blocks cut in two where there are two or more, and every part on two hosts: a-1, a-2, b-1, b-2."""
    parts = plan_host(checkpoint, (0,)).parts
    middle = -(-parts // 2)
    spans = [span for span in (tuple(range(middle)), tuple(range(middle, parts))) if span]
    names = [(f"{letter}-{i + 1}", span) for letter, span in zip(LETTERS, spans, strict=False) for i in range(REPLICAS)]
    hosts = [HostEntry(name, address, span, address) for (name, span), address in zip(names, addresses, strict=False)]
    return Topology(tuple(hosts), router, checkpoint)


def node_of(name: str, hosts: Sequence[str]) -> str:
    """The lab's node for a process of the deployment: the router's, or that of the host's place among `hosts`."""
    return ROUTER if name == ROUTER else f"host-{hosts.index(name) + 1}"


@contextlib.contextmanager
def open_stand(
    profile: str, checkpoint: Path, request_limit: int, profiles: Path | None = None, audit: float = 0.0
) -> Iterator[Stand]:
    """A ready deployment with two hosts for every block. Raises OnesweepError.

    :param request_limit: requests that the router takes at once.
    :param audit: share of sweeps that it has computed again.
    """
    router_options = ("--max-requests", str(request_limit), "--audit", str(audit))
    most = REPLICAS * len(LETTERS)
    with contextlib.ExitStack() as stack:
        if profile == LOOPBACK:
            port = free_port_block(most + 1)
            topology = doubled(checkpoint, [f"127.0.0.1:{port + 1 + i}" for i in range(most)], f"127.0.0.1:{port}")
            stand = Stand(
                stack.enter_context(temporary_deployment(topology, checkpoint, router_options=router_options))
            )
        else:
            lab = stack.enter_context(temporary_lab(profile_named(profile, profiles), most))
            addresses = [f"{lab.address(f'host-{i + 1}')}:{FIRST_PORT + 1 + i}" for i in range(most)]
            topology = doubled(checkpoint, addresses, f"{lab.address(ROUTER)}:{FIRST_PORT}")
            names = [host.name for host in topology.hosts]
            deployment = temporary_deployment(
                topology,
                checkpoint,
                place=lambda name, command: lab.command(node_of(name, names), command),
                host_options=(INSECURE,),
                router_options=(INSECURE, *router_options),
            )
            stand = Stand(stack.enter_context(deployment), lab)
        stack.callback(stand.close)
        yield stand
