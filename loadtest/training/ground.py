"""What a training's processes stand on: the nodes of a lab, or this machine as it is."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.load.target import LOOPBACK
from loadtest.wan.lab import Lab, temporary_lab
from loadtest.wan.profile import ROUTER, profile_named
from loadtest.wan_bench.deployment import FIRST_PORT, INSECURE
from serving.ports import free_port_block

MORTAL = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command: it ends with the thread that started it, however that ends."""
COORDINATOR = ROUTER
"""The node of the coordinator; workers have `host-1`, `host-2`, ..."""


@dataclass(frozen=True)
class Ground:
    """Places for one coordinator and some workers."""

    address: str
    """Where the coordinator is to listen."""
    lab: Lab | None = None
    """None on loopback, where there is no link to cut."""

    def command(self, node: str, command: list[str]) -> list[str]:
        """What runs `command` in a node, and ends with the thread that starts it."""
        if self.lab is not None:
            return self.lab.command(node, command)
        return [*MORTAL, *command] if shutil.which(MORTAL[0]) else command

    @property
    def options(self) -> tuple[str, ...]:
        """What commands need to be told to call each other here."""
        return (INSECURE,) if self.lab is not None else ()

    def set_cut(self, node: str, cut: bool) -> None:
        """Drop every packet between a worker's node and the coordinator, or carry them again. Raises LabError."""
        assert self.lab is not None, "loopback has no link to cut"
        self.lab.set_cut(COORDINATOR, node, cut)


@contextlib.contextmanager
def open_ground(profile: str, workers: int, profiles: Path | None = None) -> Iterator[Ground]:
    """:param profile: of the links, or `loopback`. Raises OnesweepError where no lab can be made."""
    if profile == LOOPBACK:
        yield Ground(f"127.0.0.1:{free_port_block(1)}")
        return
    with temporary_lab(profile_named(profile, profiles), workers) as lab:
        yield Ground(f"{lab.address(COORDINATOR)}:{FIRST_PORT}", lab)


def worker_node(number: int) -> str:
    """The node of worker `number`, from 0."""
    return f"host-{number + 1}"
