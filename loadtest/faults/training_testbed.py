"""A training to measure or to break, as real processes in a lab or on loopback; and the faults it knows.

    with open_training_testbed(TrainingSetup(config, text, (0, 1), "links-60", None)) as testbed:
        testbed.start()
        testbed.wait_end(60.0)

A process in a lab ends with the thread that starts it: call the methods from one thread.
"""

import contextlib
import json
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from loadtest.faults.base import End, Fault, Program, no_link
from loadtest.lab.profile import ROUTER
from loadtest.workload.testbed import Network, open_network
from serving.cli.deployment import MODULE
from stages.errors import ServiceError
from trainer.rounds.service import STORE
from trainer.rounds.store import DATABASE, connect

POLL_S = 0.05
COORDINATOR = "coordinator"  # the target of faults that are done to it


@dataclass(frozen=True)
class LogEntry:
    """One event: the run, an update that was `accepted` or `dropped`, or a round that was `closed`."""

    at_s: float  # when it was first seen, seconds of the monotonic clock
    record: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.record["kind"])

    @property
    def part(self) -> str:
        return str(self.record.get("part", ""))


class EventFollower:
    """The events of a run's rounds, read while the coordinator writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[LogEntry] = []

    def look(self) -> list[LogEntry]:
        """The events since the last look. Raises ServiceError where one that was there has gone."""
        if not self.path.exists():
            return []
        known, now = len(self.entries), time.monotonic()
        try:
            with contextlib.closing(connect(self.path)) as database:
                count = database.execute("SELECT COUNT(*) FROM events").fetchone()[0]
                query = "SELECT record FROM events ORDER BY number LIMIT -1 OFFSET ?"
                new = [LogEntry(now, json.loads(text)) for (text,) in database.execute(query, (known,))]
        except sqlite3.OperationalError:  # it is just being made, or the disk has no room for who reads
            return []
        if count < known:
            raise ServiceError(f"{self.path} has {count} events, and had {known}")
        self.entries += new
        return new

    def closed(self, part: str) -> int:
        """Rounds of a part that were closed."""
        return sum(entry.kind == "closed" and entry.part == part for entry in self.entries)


@dataclass(frozen=True)
class TrainingSetup:
    """A run, and its workers."""

    config: Path
    data: Path | None  # None: the text that ships with Python
    parts: tuple[int, ...]  # the part of each worker: `w0`, `w1`, ...
    profile: str  # of the links between workers and coordinator
    profiles: Path | None
    lease_s: float = 30.0


class TrainingTestbed:
    """The processes of one training, and where their files are."""

    def __init__(self, setup: TrainingSetup, network: Network, directory: Path) -> None:
        self.setup, self.network, self.directory = setup, network, directory
        self.address = network.address(ROUTER)  # the coordinator's node; workers have `host-1`, `host-2`, ...
        self.out = directory / "out"
        self.log = EventFollower(self.out / STORE / DATABASE)
        self.names = tuple(f"w{number}" for number in range(len(setup.parts)))  # of the workers
        self._data = () if setup.data is None else ("--data", str(setup.data))
        self.coordinator = self._program(
            COORDINATOR,
            ROUTER,
            *("train", "coordinate", "--config", str(setup.config), *self._data, "--out", str(self.out)),
            *("--listen", self.address, "--lease", str(setup.lease_s)),
            *("--publish-every", "5", "--threads", "1"),
        )
        self.workers = {name: self.worker(name) for name in self.names}

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

    def worker(self, name: str) -> Program:
        """The worker of a name."""
        return self._program(
            name,
            self.node(name),
            *("train", "work", "--coordinator", self.address, *self._data, "--name", name),
            *("--block", str(self.part(name)), "--state", str(self.state(name)), "--wait", "--threads", "1"),
            *("--save-every", "1"),
        )

    def start(self) -> None:
        """Start what does not run."""
        self._moved_s = time.monotonic()
        for program in self.programs:
            program.start()

    def wait_end(self, patience_s: float) -> None:
        """Wait for the end of the run and of every process.

        Raises ServiceError with the last words of a process that failed, or when there is no progress for so long.
        """
        while any(program.ended is None for program in self.programs):
            self.check()
            self.tick()
            if not self.is_alive(patience_s):
                raise ServiceError(f"nothing happened for {patience_s:.0f} s: {self.coordinator.last_words()}")
        self.check()
        self.log.look()

    def tick(self) -> None:
        """Wait a moment, and read what happened meanwhile."""
        time.sleep(POLL_S)
        if self.log.look():
            self._moved_s = time.monotonic()

    def is_alive(self, patience_s: float) -> bool:
        """True while anything happened in so many seconds."""
        return time.monotonic() - self._moved_s < patience_s

    def check(self) -> None:
        """Raise ServiceError with the last words of a process that ended, other than as it should."""
        for program in self.programs:
            if program.ended:
                raise ServiceError(f"{program.name} ended ({program.ended}): {program.last_words()}")

    def close(self) -> None:
        """End everything at once: what was accepted is stored."""
        for program in reversed(self.programs):
            program.kill()

    def _program(self, name: str, node: str, *arguments: str) -> Program:
        command = [sys.executable, *MODULE, *arguments, *self.network.options]
        return Program(name, self.network.command(node, command), self.directory / f"{name}.log")

    # `target` is the name of a worker, or COORDINATOR. Each begins a fault, and returns what ends it.

    def program(self, target: str) -> Program:
        return self.coordinator if target == COORDINATOR else self.workers[target]

    def kill(self, target: str) -> End:
        self.program(target).kill()
        return self.program(target).start

    def freeze(self, target: str) -> End:
        self.workers[target].signal(signal.SIGSTOP)
        return partial(self.workers[target].signal, signal.SIGCONT)

    def cut(self, target: str) -> End:
        """Drop every packet between a worker and the coordinator. Raises LabError."""
        self.network.cut(ROUTER, self.node(target))
        return partial(self.network.cut, ROUTER, self.node(target), False)


@contextlib.contextmanager
def open_training_testbed(setup: TrainingSetup) -> Iterator[TrainingTestbed]:
    """A testbed whose processes are not started yet; they, and their files, are gone after the `with` block.

    Raises OnesweepError where no lab can be made.
    """
    directory = Path(tempfile.mkdtemp(prefix="onesweep-training-"))
    try:
        with (
            open_network(setup.profile, len(setup.parts), setup.profiles) as network,
            contextlib.closing(TrainingTestbed(setup, network, directory)) as testbed,
        ):
            yield testbed
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_Bed = TrainingTestbed
_WORKERS: Callable[[TrainingTestbed], tuple[str, ...]] = attrgetter("names")


_ALL: tuple[Fault[TrainingTestbed], ...] = (
    Fault("kill", (1.0, 4.0), _Bed.kill, _WORKERS, weight=3),
    # longer than a lease: it wakes up in a later round, and does not know it
    Fault("freeze", (8.0, 12.0), _Bed.freeze, _WORKERS, weight=2),
    Fault("cut", (3.0, 8.0), _Bed.cut, _WORKERS, weight=2, absent=no_link),
    Fault("coordinator", (0.5, 4.0), _Bed.kill, lambda training: (COORDINATOR,), weight=3),
)
TRAINING_FAULTS: Mapping[str, Fault[TrainingTestbed]] = {fault.name: fault for fault in _ALL}
