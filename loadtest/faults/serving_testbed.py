"""A deployment to break, with every block on two hosts, in a lab or on loopback; and the faults it knows."""

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from loadtest.faults.base import End, Fault, Program, no_link
from loadtest.faults.settings import ChaosSettings, FaultSettings
from loadtest.lab.profile import ROUTER
from loadtest.workload.testbed import Testbed, deployed, open_network
from serving.cli.deployment import MODULE, Deployment
from serving.router.topology import HostEntry, Topology
from stages.host.parts import plan_host

REPLICAS = 2
LETTERS = "ab"
MOST_HOSTS = REPLICAS * len(LETTERS)
STOP_S = 30.0
# Of a slow host: the length of a turn, and the part of it in which it runs.
TURN_S, SLOW_SHARE = 0.1, 0.1
SPARE_BYTES = 1 << 20


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

    def kill(self, *names: str) -> End:
        end = contextlib.ExitStack()
        for name in names:
            self.deployment.kill(name)
            end.callback(self.deployment.revive, name)
        return end.close

    def kill_half(self, number: str) -> End:
        """Kill a replica of every range of blocks at once."""
        return self.kill(*self.hosts[int(number) - 1 :: REPLICAS])

    def freeze(self, name: str) -> End:
        self._signal(name, signal.SIGSTOP)
        return partial(self._signal, name, signal.SIGCONT)

    def restart(self, name: str) -> End:
        """Ask a host to end: it lets its sessions end first."""
        self._signal(name, signal.SIGTERM)

        def end() -> None:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.deployment.processes[name]).wait(STOP_S)
            self.deployment.revive(name)

        return end

    def slow_down(self, name: str) -> End:
        """Let a host run for a tenth of the time, in short turns."""
        end, ended = contextlib.ExitStack(), threading.Event()

        def take_turns() -> None:
            while not ended.wait(TURN_S * SLOW_SHARE):
                thaw = self.freeze(name)
                ended.wait(TURN_S * (1 - SLOW_SHARE))
                thaw()

        slower = threading.Thread(target=take_turns, daemon=True)
        slower.start()
        end.callback(slower.join)
        end.callback(ended.set)
        return end.close

    def starve(self, name: str) -> End:
        """Give a host no memory beyond what it has, so that its allocations fail."""
        self._limit_memory(name, SPARE_BYTES)

        def end() -> None:
            self._limit_memory(name, None)
            if name in self.deployment.ended():
                self.deployment.revive(name)

        return end

    def alter(self, link: str, **changes: Any) -> End:  # noqa: ANN401 - those of `Network.alter`
        """Change one of `links`."""
        nodes = {ROUTER: ROUTER} | {name: f"host-{i + 1}" for i, name in enumerate(self.hosts)}
        one, other = (nodes[name] for name in link.split(" - "))
        change = partial(self.opened.network.alter, one, other)
        change(**changes)
        return change

    def put_impostor(self, name: str) -> End:
        """Put a host of `faulty_host` in another's place, started as the deployment starts that."""
        self.deployment.kill(name)
        command = self.deployment.commands[name]
        at = command.index(MODULE[-1])
        faulty = [*command[:at], "loadtest.faults.faulty_host", *command[at + 1 :]]
        impostor = Program(name, faulty, self.deployment.directory / f"{name}-garbage.log")
        impostor.start()
        end = contextlib.ExitStack()
        end.callback(self.deployment.revive, name)
        end.callback(impostor.kill)
        return end.close

    def _limit_memory(self, name: str, spare_bytes: int | None) -> None:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            process = psutil.Process(self.deployment.processes[name])
            most = resource.prlimit(process.pid, resource.RLIMIT_AS)[1]
            size = most if spare_bytes is None else process.memory_info().vms + spare_bytes
            resource.prlimit(process.pid, resource.RLIMIT_AS, (size, most))

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
    options = ("--set", f"audit_share={settings.audit}")
    with open_network(settings.profile, MOST_HOSTS, settings.profiles) as network:
        addresses = [network.address(node) for node in network.nodes]
        topology = replicated(checkpoint, addresses[1:], addresses[0])
        host, port = addresses[0].rpartition(":")[0], network.first_port + MOST_HOSTS + 1
        second = f"{host}:{port}" if settings.routers > 1 else None
        with deployed(network, checkpoint, topology, router_options=options, second=second) as opened:
            assert opened.deployment is not None
            yield ServingTestbed(opened, opened.deployment)


# The faults


def _no_impostor(settings: FaultSettings) -> str:
    audited = isinstance(settings, ChaosSettings) and settings.audit
    return "a host that an audit caught gets no more work: --audit leaves it out" if audited else ""


_Bed = ServingTestbed
_HOSTS, _LINKS, _ROUTERS = attrgetter("hosts"), attrgetter("links"), attrgetter("routers")


def _altered(name: str, **changes: Any) -> Fault[ServingTestbed]:  # noqa: ANN401 - those of `alter`
    """A link that is changed for a while."""
    return Fault(name, (8.0, 12.0), partial(_Bed.alter, **changes), _LINKS, absent=no_link)


_ALL: tuple[Fault[ServingTestbed], ...] = (
    Fault("kill", (2.0, 4.0), _Bed.kill, _HOSTS, weight=4),
    # connections stay open, and no answer comes
    Fault("freeze", (2.0, 5.0), _Bed.freeze, _HOSTS, weight=2),
    Fault("cut", (3.0, 6.0), partial(_Bed.alter, loss=1.0), _LINKS, 3, absent=no_link),
    Fault("garbage", (4.0, 6.0), _Bed.put_impostor, _HOSTS, weight=2, absent=_no_impostor, stands_in=True),
    # as for new software
    Fault("restart", (6.0, 8.0), _Bed.restart, _HOSTS, weight=2),
    # every request is cut off, and clients call again
    Fault("router", (0.5, 1.5), _Bed.kill, _ROUTERS, weight=2),
    Fault("half", (2.0, 4.0), _Bed.kill_half, lambda bed: ["1", "2"]),
    # long enough for many requests to meet it, and for TCP to find its pace
    Fault("slow", (8.0, 12.0), _Bed.slow_down, _HOSTS),
    Fault("memory", (4.0, 6.0), _Bed.starve, _HOSTS),
    _altered("one-way", loss=1.0, both=False),
    _altered("loss-1", loss=0.01),
    _altered("loss-5", loss=0.05),
    _altered("slow-link", slower=100.0),
)
SERVING_FAULTS: Mapping[str, Fault[ServingTestbed]] = {fault.name: fault for fault in _ALL}
