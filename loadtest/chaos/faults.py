"""What can be done to a deployment: a fault is a small class and an entry of FAULTS."""

from __future__ import annotations

import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import psutil

from loadtest.chaos.second import second_problem
from loadtest.chaos.stand import Stand
from loadtest.load.target import LOOPBACK
from loadtest.wan.profile import ROUTER

STOP_S = 30.0


class Fault(ABC):
    """One kind of fault. It begins, lasts, and ends; what comes at both ends is quickly done."""

    name: ClassVar[str]
    words: ClassVar[str]
    weight: ClassVar[int] = 1
    """How often it comes, beside the others."""
    length_s: ClassVar[tuple[float, float]]
    """Shortest and longest."""
    stands_in: ClassVar[bool] = False
    """Whether it lasts from the moment that the router uses its target again: what stands there needs time to start."""

    def absent(self, profile: str, checkpoint: Path) -> str:
        """Why it cannot be done in a network, or with a checkpoint; empty when it can."""
        return ""

    @abstractmethod
    def targets(self, stand: Stand) -> list[str]:
        """What it can be done to."""

    @abstractmethod
    def begin(self, stand: Stand, target: str) -> None: ...

    @abstractmethod
    def end(self, stand: Stand, target: str) -> None: ...


class HostFault(Fault):
    """Something that is done to one host."""

    def targets(self, stand: Stand) -> list[str]:
        return stand.hosts


class Kill(HostFault):
    """Nothing is said, nothing is saved."""

    name, words, weight, length_s = "kill", "a host gets SIGKILL, and starts again later", 4, (2.0, 4.0)

    def begin(self, stand: Stand, target: str) -> None:
        stand.deployment.kill(target)

    def end(self, stand: Stand, target: str) -> None:
        stand.deployment.revive(target)


class Freeze(HostFault):
    """Connections stay open and nobody answers."""

    name, words, weight, length_s = "freeze", "a host gets SIGSTOP, and SIGCONT later", 2, (2.0, 5.0)

    def begin(self, stand: Stand, target: str) -> None:
        stand.signal(target, signal.SIGSTOP)

    def end(self, stand: Stand, target: str) -> None:
        stand.signal(target, signal.SIGCONT)


class Cut(Fault):
    """Packets vanish, both ways."""

    name, words, weight, length_s = "cut", "every packet between two machines is dropped", 3, (3.0, 6.0)

    def absent(self, profile: str, checkpoint: Path) -> str:
        return "" if profile != LOOPBACK else "loopback has no link to cut: --profile names one that has"

    def targets(self, stand: Stand) -> list[str]:
        return stand.links

    def begin(self, stand: Stand, target: str) -> None:
        stand.set_cut(target, True)

    def end(self, stand: Stand, target: str) -> None:
        stand.set_cut(target, False)


class Garbage(HostFault):
    """A host that takes part and answers nonsense (liar.py)."""

    name, words, weight, length_s = "garbage", "a host that answers nonsense stands in for another", 2, (4.0, 6.0)
    stands_in = True

    def begin(self, stand: Stand, target: str) -> None:
        stand.replace(target)

    def end(self, stand: Stand, target: str) -> None:
        stand.restore(target)


class Restart(HostFault):
    """As for new software: the host lets its sessions end, then goes."""

    name, words, weight, length_s = "restart", "a host gets SIGTERM: it drains, ends, starts again", 2, (6.0, 8.0)

    def begin(self, stand: Stand, target: str) -> None:
        stand.signal(target, signal.SIGTERM)

    def end(self, stand: Stand, target: str) -> None:
        with contextlib.suppress(psutil.Error):
            psutil.Process(stand.deployment.processes[target]).wait(STOP_S)
        stand.deployment.revive(target)


class RouterRestart(Fault):
    """Every request is cut off; clients call again."""

    name, words, weight, length_s = "router", "the router gets SIGKILL, and starts again", 2, (0.5, 1.5)

    def targets(self, stand: Stand) -> list[str]:
        return [ROUTER]

    def begin(self, stand: Stand, target: str) -> None:
        stand.deployment.kill(target)

    def end(self, stand: Stand, target: str) -> None:
        stand.deployment.revive(target)


class Flood(Fault):
    """Ten times the clients, for a while. The run starts and stops them: their answers are checked as well."""

    name, words, length_s = "flood", "another crowd, of ten times the clients, asks as well", (10.0, 12.0)

    def targets(self, stand: Stand) -> list[str]:
        return [ROUTER]

    def begin(self, stand: Stand, target: str) -> None:
        stand.flood(True)

    def end(self, stand: Stand, target: str) -> None:
        stand.flood(False)


class Swap(Fault):
    """Other weights, under load: each text is of the one release or of the other, and never of both."""

    name, words, weight, length_s = "swap", "other weights are deployed, and rolled back later", 1, (6.0, 10.0)

    def absent(self, profile: str, checkpoint: Path) -> str:
        return second_problem(checkpoint)

    def targets(self, stand: Stand) -> list[str]:
        return [ROUTER]

    def begin(self, stand: Stand, target: str) -> None:
        stand.deploy()

    def end(self, stand: Stand, target: str) -> None:
        stand.roll_back()


FAULTS: Mapping[str, Fault] = {
    fault.name: fault for fault in (Kill(), Freeze(), Cut(), Garbage(), Restart(), RouterRestart(), Flood(), Swap())
}
