"""A training to measure or to break: one coordinator and its workers as real processes, in a lab or on loopback.

    with open_training_testbed(TrainingSetup(config, text, profile="links-60"), TrainingTestbed) as testbed:
        testbed.start()
        testbed.wait_until(lambda: testbed.log.accepted >= 10, 60.0)
        testbed.workers["w0"].kill()

A process in a lab ends with the thread that starts it: call the methods from one thread.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loadtest.faults.process import Disk, Program, open_disk
from loadtest.faults.training_observer import EventFollower, RunView, RunWatcher
from loadtest.lab.profile import ROUTER, Profile
from loadtest.workload.testbed import LOOPBACK, Network, open_network
from serving.cli.deployment import MODULE
from stages.errors import ServiceError

STORE, DATABASE = "rounds", "rounds.sqlite3"  # as a coordinator names them; to import it would import torch

POLL_S = 0.05
COORDINATOR_NODE = ROUTER  # workers have the nodes `host-1`, `host-2`, ...


@dataclass(frozen=True)
class TrainingSetup:
    """A run, and its workers."""

    config: Path
    data: Path | None = None  # None: the text that ships with Python
    parts: tuple[int, ...] = (0, 0, 1, 1, 2, 2)  # the part of each worker: `w0`, `w1`, ...
    profile: str | Profile = LOOPBACK  # of the links between workers and coordinator
    profiles: Path | None = None
    lease_s: float = 30.0
    publish_every: int = 10
    save_every_s: float = 60.0
    patience_s: float = 600.0  # how long a worker looks for its coordinator
    look_every_s: float = 0.5  # least time between two views of the run
    worker_options: tuple[str, ...] = ()
    own_disk: bool = False  # the coordinator writes to a file system of its own, where this process may mount one


class TrainingTestbed:
    """The processes of one training, and where their files are."""

    def __init__(self, setup: TrainingSetup, network: Network, directory: Path, disk: Disk | None = None) -> None:
        """:param disk: for all that the coordinator writes."""
        self.setup, self.network, self.directory, self.disk = setup, network, directory, disk
        self.address = network.address(COORDINATOR_NODE)
        self.out = (directory if disk is None else disk.path) / "out"
        self.log = EventFollower(self.out / STORE / DATABASE)
        self.names = tuple(f"w{number}" for number in range(len(setup.parts)))  # of the workers
        self._data = () if setup.data is None else ("--data", str(setup.data))
        self.coordinator = self._program(
            "coordinator",
            COORDINATOR_NODE,
            *("train", "coordinate", "--config", str(setup.config), *self._data, "--out", str(self.out)),
            *("--listen", self.address, "--lease", str(setup.lease_s)),
            *("--publish-every", str(setup.publish_every), "--threads", "1"),
        )
        self.workers = {name: self.worker(name, self.state(name)) for name in self.names}
        self.watcher: RunWatcher | None = None

    @property
    def view(self) -> RunView | None:
        """The run as its coordinator last reported it."""
        return self.watcher.last if self.watcher is not None else None

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.coordinator, *self.workers.values())

    def node(self, name: str) -> str:
        """The lab's node that a worker is in."""
        return f"host-{self.names.index(name) + 1}"

    def part(self, name: str) -> int:
        return self.setup.parts[self.names.index(name)]

    def state(self, name: str) -> Path:
        """The directory in which a worker keeps its state."""
        return self.directory / name

    def worker(self, name: str, state: Path, label: str = "") -> Program:
        """A worker in the place of `name`, with a state directory; `label` names its log where it is not the first."""
        return self._program(
            label or name,
            self.node(name),
            *("train", "work", "--coordinator", self.address, *self._data, "--name", name),
            *("--block", str(self.part(name)), "--state", str(state), "--wait", "--threads", "1"),
            *("--save-every", str(self.setup.save_every_s), "--patience", str(self.setup.patience_s)),
            *self.setup.worker_options,
        )

    def beside(self, node: str, name: str, command: list[str]) -> Program:
        """Any other command that runs in a node."""
        return Program(name, self.network.command(node, command), self.directory / f"{name}.log")

    def start(self) -> None:
        """Start what does not run, and watch it."""
        for program in self.programs:
            program.start()
        if self.watcher is None:
            look = ["train", "status", self.address, "--json", "--interval", str(self.setup.look_every_s)]
            command = [sys.executable, *MODULE, *look, *self.network.options]
            self.watcher = RunWatcher(self.network.command(COORDINATOR_NODE, command), self.directory / "watch.log")

    def wait_until(self, happened: Callable[[], bool], within_s: float) -> bool:
        """False when nothing happened in time; the log is read meanwhile. Raises ServiceError."""
        deadline = time.monotonic() + within_s
        while True:
            self.log.look()
            if happened():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)

    def follow(self, told: Callable[[RunView], object], within_s: float) -> bool:
        """Hand each new view on, until the run is over; False when it is not over in time.

        Raises ServiceError with the last words of a process that failed.
        """
        last: RunView | None = None

        def ended() -> bool:
            nonlocal last
            self.check()
            if (view := self.view) is not None and view is not last:
                last = view
                told(view)
            return last is not None and last.finished

        return self.wait_until(ended, within_s)

    def wait_end(self, patience_s: float) -> bool:
        """Wait for the end of the run and of every process; False when there is no progress for so long.

        Raises ServiceError with the last words of a process that failed.
        """
        moved, known = time.monotonic(), -1
        while any(program.ended is None for program in self.programs):
            self.check()
            self.log.look()
            if (now := sum(p.ended is not None for p in self.programs) + len(self.log.entries)) != known:
                moved, known = time.monotonic(), now
            if time.monotonic() - moved > patience_s:
                return False
            time.sleep(POLL_S)
        self.check()
        self.log.look()
        return True

    def check(self) -> None:
        """Raise ServiceError with the last words of a process that ended, other than as it should."""
        for program in self.programs:
            if program.ended:
                raise ServiceError(f"{program.name} ended ({program.ended}): {program.last_words()}")

    def close(self) -> None:
        """End everything at once: what was accepted is stored."""
        if self.watcher is not None:
            self.watcher.close()
        for program in reversed(self.programs):
            program.kill()

    def _program(self, name: str, node: str, *arguments: str) -> Program:
        return self.beside(node, name, [sys.executable, *MODULE, *arguments, *self.network.options])


B = TypeVar("B", bound=TrainingTestbed)


@contextlib.contextmanager
def open_training_testbed(
    setup: TrainingSetup, make: Callable[[TrainingSetup, Network, Path, Disk | None], B]
) -> Iterator[B]:
    """A testbed whose processes are not started yet; they, and their files, are gone after the `with` block.

    Raises OnesweepError where no lab can be made.
    """
    directory = Path(tempfile.mkdtemp(prefix="onesweep-training-"))
    try:
        with contextlib.ExitStack() as under:
            network = under.enter_context(open_network(setup.profile, len(setup.parts), setup.profiles))
            disk = under.enter_context(open_disk(directory / "disk")) if setup.own_disk else None
            testbed = make(setup, network, directory, disk)
            under.callback(testbed.close)
            yield testbed
    finally:
        shutil.rmtree(directory, ignore_errors=True)
