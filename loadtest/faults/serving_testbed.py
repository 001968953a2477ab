"""A deployment to break, with every block on two hosts, in a lab or on loopback; and the faults it knows."""

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import psutil

from loadtest.faults.base import End, Fault, no_link
from loadtest.faults.settings import ChaosSettings
from loadtest.lab.profile import ROUTER
from loadtest.workload.testbed import Testbed, deployed, open_network
from serving.cli.deployment import Deployment
from serving.router.topology import HostEntry, Topology
from stages.host.parts import plan_host

REPLICAS = 2
LETTERS = "ab"
MOST_HOSTS = REPLICAS * len(LETTERS)


@dataclass
class ServingTestbed:
    """A running deployment, and what can be done to its parts."""

    opened: Testbed
    deployment: Deployment

    @property
    def router(self) -> str:
        """Address, or addresses, for clients."""
        return ",".join([self.deployment.topology.router, *self.routers[1:]])

    @property
    def hosts(self) -> list[str]:
        return [host.name for host in self.deployment.topology.hosts]

    @property
    def routers(self) -> list[str]:
        """Names of their processes: that of a second one is its address."""
        return [name for name in self.deployment.processes if name not in self.hosts]

    @property
    def links(self) -> list[str]:
        """The links that a request can take, by the names of both ends."""
        topology, first = self.deployment.topology, self.deployment.topology.hosts[0].blocks
        ends = [(ROUTER, host.name) for host in topology.hosts]
        ends += [(a.name, b.name) for a in topology.hosts for b in topology.hosts if a.blocks == first != b.blocks]
        return [f"{one} - {other}" for one, other in ends]

    # Each begins a fault, and returns what ends it.

    def kill(self, name: str) -> End:
        self.deployment.kill(name)
        return partial(self.deployment.revive, name)

    def freeze(self, name: str) -> End:
        self._signal(name, signal.SIGSTOP)
        return partial(self._signal, name, signal.SIGCONT)

    def cut(self, link: str) -> End:
        """Drop all packets of one of `links`."""
        nodes = {ROUTER: ROUTER} | {name: f"host-{i + 1}" for i, name in enumerate(self.hosts)}
        one, other = (nodes[name] for name in link.split(" - "))
        self.opened.network.cut(one, other)
        return partial(self.opened.network.cut, one, other, False)

    def _signal(self, name: str, number: int) -> None:
        """Send a signal to a process of the deployment, if it still is the one that has this number."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.deployment.processes[name])
            if name in process.cmdline():
                process.send_signal(number)


def replicated(checkpoint: Path, addresses: Sequence[str], router: str) -> Topology:
    """The blocks cut in two where there are two or more, and every part on two hosts: a-1, a-2, b-1, b-2."""
    parts = plan_host(checkpoint, (0,)).parts
    middle = -(-parts // 2)
    spans = [span for span in (tuple(range(middle)), tuple(range(middle, parts))) if span]
    names = [(f"{letter}-{i + 1}", span) for letter, span in zip(LETTERS, spans, strict=False) for i in range(REPLICAS)]
    hosts = [HostEntry(name, address, span, address) for (name, span), address in zip(names, addresses, strict=False)]
    return Topology(tuple(hosts), router, checkpoint)


@contextlib.contextmanager
def open_serving_testbed(settings: ChaosSettings, checkpoint: Path) -> Iterator[ServingTestbed]:
    """A ready deployment with two hosts for every block. Raises OnesweepError."""
    with open_network(settings.profile, MOST_HOSTS, settings.profiles) as network:
        addresses = [network.address(node) for node in network.nodes]
        topology = replicated(checkpoint, addresses[1:], addresses[0])
        host, port = addresses[0].rpartition(":")[0], network.first_port + MOST_HOSTS + 1
        second = f"{host}:{port}" if settings.routers > 1 else None
        with deployed(network, checkpoint, topology, second=second) as opened:
            assert opened.deployment is not None
            yield ServingTestbed(opened, opened.deployment)


_Bed = ServingTestbed
_HOSTS, _LINKS, _ROUTERS = attrgetter("hosts"), attrgetter("links"), attrgetter("routers")

_ALL: tuple[Fault, ...] = (
    Fault("kill", (2.0, 4.0), _Bed.kill, _HOSTS),
    # connections stay open, and no answer comes
    Fault("freeze", (2.0, 5.0), _Bed.freeze, _HOSTS),
    Fault("cut", (3.0, 6.0), _Bed.cut, _LINKS, absent=no_link),
    # every request is cut off, and clients call again
    Fault("router", (0.5, 1.5), _Bed.kill, _ROUTERS),
    Fault("frozen-router", (2.0, 5.0), _Bed.freeze, _ROUTERS),
)
SERVING_FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}
