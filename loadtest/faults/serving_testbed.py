"""A deployment to break, with every block on two hosts behind two routers; its faults, and their schedule."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from loadtest.lab.profile import ROUTER
from loadtest.simulation.schedule import PlannedFault
from loadtest.workload.testbed import Testbed, block_count, deployed, open_network
from serving.cli.deployment import Deployment
from serving.router.topology import HostEntry, Topology

if TYPE_CHECKING:
    from loadtest.benches import ChaosSettings

REPLICAS = 2
LETTERS = "ab"
MAX_HOSTS = REPLICAS * len(LETTERS)
End = Callable[[], object]  # ends a fault


@dataclass
class ServingTestbed:
    """A running deployment, and the faults of its parts."""

    opened: Testbed
    deployment: Deployment

    @property
    def router(self) -> str:
        """The router address or addresses for clients."""
        return ",".join([self.deployment.topology.router, *self.routers[1:]])

    @property
    def hosts(self) -> list[str]:
        return [host.name for host in self.deployment.topology.hosts]

    @property
    def routers(self) -> list[str]:
        """Names of the routers' processes; a second router's name is its address."""
        return [name for name in self.deployment.processes if name not in self.hosts]

    @property
    def links(self) -> list[str]:
        """The links that a request can use, as names of both ends."""
        topology, first = self.deployment.topology, self.deployment.topology.hosts[0].blocks
        ends = [(ROUTER, host.name) for host in topology.hosts]
        ends += [(a.name, b.name) for a in topology.hosts for b in topology.hosts if a.blocks == first != b.blocks]
        return [f"{one} - {other}" for one, other in ends]

    # Each begins a fault and returns the function that ends it.

    def kill(self, name: str) -> End:
        self.deployment.kill(name)
        return partial(self.deployment.revive, name)

    def freeze(self, name: str) -> End:
        """Suspend a process: connections stay open, and no answer comes."""
        self._signal(name, signal.SIGSTOP)
        return partial(self._signal, name, signal.SIGCONT)

    def _signal(self, name: str, number: int) -> None:
        """Send a signal to a process of the deployment, if it still has its process id."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.deployment.processes[name])
            if name in process.cmdline():
                process.send_signal(number)

    def cut(self, link: str) -> End:
        """Drop all packets of one of `links`."""
        nodes = {ROUTER: ROUTER} | {name: f"host-{i + 1}" for i, name in enumerate(self.hosts)}
        one, other = (nodes[name] for name in link.split(" - "))
        lab = self.opened.network.lab
        assert lab is not None, "loopback has no link to cut"
        lab.cut(one, other)
        return partial(lab.cut, one, other, False)


def replicated(checkpoint: Path, addresses: Sequence[str], router: str) -> Topology:
    """The blocks cut in two if there are two or more, and every part on two hosts: a-1, a-2, b-1, b-2."""
    parts = block_count(checkpoint)
    middle = -(-parts // 2)
    spans = [span for span in (tuple(range(middle)), tuple(range(middle, parts))) if span]
    names = [(f"{letter}-{i + 1}", span) for letter, span in zip(LETTERS, spans, strict=False) for i in range(REPLICAS)]
    hosts = [HostEntry(name, address, span, address) for (name, span), address in zip(names, addresses, strict=False)]
    return Topology(tuple(hosts), router, checkpoint)


@contextlib.contextmanager
def open_serving_testbed(settings: ChaosSettings, checkpoint: Path) -> Iterator[ServingTestbed]:
    """A ready deployment with two hosts per block. Raises OnesweepError."""
    with open_network(settings.profile, MAX_HOSTS) as network:
        addresses = [network.address(node) for node in network.nodes]
        topology = replicated(checkpoint, addresses[1:], addresses[0])
        host, port = addresses[0].rpartition(":")[0], network.first_port + MAX_HOSTS + 1
        with deployed(network, checkpoint, topology, second=f"{host}:{port}") as opened:
            assert opened.deployment is not None
            yield ServingTestbed(opened, opened.deployment)


@dataclass(frozen=True)
class Fault:
    """A kind of fault of a testbed, which begins, lasts and ends."""

    length_s: tuple[float, float]  # shortest and longest
    begin: Callable[[ServingTestbed, str], End]
    targets: Callable[[ServingTestbed], Sequence[str]]  # names of possible targets


FAULTS: Mapping[str, Fault] = {
    "kill": Fault((2.0, 4.0), ServingTestbed.kill, attrgetter("hosts")),
    "freeze": Fault((2.0, 5.0), ServingTestbed.freeze, attrgetter("hosts")),
    "cut": Fault((3.0, 6.0), ServingTestbed.cut, attrgetter("links")),
    "router": Fault((0.5, 1.5), ServingTestbed.kill, attrgetter("routers")),
    "frozen-router": Fault((2.0, 5.0), ServingTestbed.freeze, attrgetter("routers")),
}
FAULTS_A_MINUTE = 2.4
QUIET = 0.2  # a fault begins within this share of its turn


def make_schedule(targets: Mapping[str, Sequence[str]], settings: ChaosSettings) -> list[PlannedFault]:
    """Draw faults from a seed, one in each equal turn of the time: every kind equally often, its targets in turn.

    :param targets: names by kind of fault.
    """
    chance = random.Random(settings.seed)
    drawn = [*targets] * max(1, round(settings.minutes * FAULTS_A_MINUTE / len(targets)))
    orders = {name: chance.sample(each, len(each)) for name, each in targets.items()}
    turn_s = (settings.seconds - settings.warm_up_s) / len(drawn)
    plan = []
    for i, name in enumerate(chance.sample(drawn, len(drawn))):
        orders[name].append(target := orders[name].pop(0))
        length_s = round(settings.length_scale * chance.uniform(*FAULTS[name].length_s), 2)
        # early in its turn, so that there is time to recover before the next one
        plan.append(PlannedFault(name, (target,), round((i + chance.uniform(0, QUIET)) * turn_s, 2), length_s))
    return plan
