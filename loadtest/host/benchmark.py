"""One frame for every benchmark of this machine, and the deployment on loopback that most of them measure."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.modes import MODES
from onesweep.serving.router.topology import Topology, local_topology
from onesweep.stages.errors import InputError, OnesweepError, one_of
from onesweep.stages.host.parts import plan_host

PROMPT = b"The old man looked at the sea and said that"
RING = 3

S = TypeVar("S")
R = TypeVar("R")


class TextDiffers(OnesweepError):
    """Two ways that must give the same text do not: nothing that is measured then means anything."""


class Benchmark(ABC, Generic[S, R]):
    """A measurement with its settings S and its result R, which a table and a JSON record show."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def announcement(self) -> str:
        """The line that is printed before the measurement."""

    def check(self) -> None:
        """Raise OnesweepError for settings that cannot be measured, before anything is started."""

    @abstractmethod
    def measure(self) -> R:
        """Raises OnesweepError."""

    @abstractmethod
    def table(self, result: R) -> str:
        """The result for a terminal."""

    @abstractmethod
    def record(self, result: R) -> dict[str, Any]:
        """Settings and result for a JSON file."""

    def holds(self, result: R) -> bool:
        """False where the result is a failure, which the exit code says."""
        return True


def ring_of(checkpoint: Path, hosts: int | None = None, replicas: int = 1) -> Topology:
    """Hosts on loopback that share the parts of a bundle, on free ports.

    :param hosts: None = three, or one for each part where there are fewer. Raises InputError, CheckpointError.
    """
    parts = plan_host(checkpoint, (0,)).parts
    hosts = min(RING, parts) if hosts is None else hosts
    return local_topology(hosts, parts, checkpoint, free_port_block(hosts * replicas + 1) + 1, replicas)


def check_modes(modes: tuple[str, ...]) -> None:
    """Raises InputError for a mode that does not exist."""
    for mode in modes:
        if mode not in MODES:
            raise InputError(f"unknown mode {mode!r}{one_of(mode, MODES)}")
