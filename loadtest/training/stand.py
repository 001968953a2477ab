"""A training to measure or to break: one coordinator and its workers as real processes, in a lab or on loopback.

    with open_stand(StandSettings(config, text, profile="links-60")) as stand:
        stand.start()
        stand.wait_until(lambda: stand.journal.accepted >= 10, 60.0)
        stand.workers["w0"].kill()

Everything of it is started by the thread that calls its methods, and ends with that thread: call them from one.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.load.target import LOOPBACK
from loadtest.training.disk import Disk, open_disk
from loadtest.training.ground import COORDINATOR, Ground, open_ground, worker_node
from loadtest.training.journal import NAME, Journal
from loadtest.training.program import Program
from loadtest.training.watch import Watch
from serving.deployment import MODULE
from stages.errors import ServiceError

POLL_S = 0.05


@dataclass(frozen=True)
class StandSettings:
    """A run, and who works on it."""

    config: Path
    data: Path | None = None
    """None: the text that ships with Python."""
    parts: tuple[int, ...] = (0, 0, 1, 1, 2, 2)
    """The part of each worker: `w0`, `w1`, ..."""
    profile: str = LOOPBACK
    """Of the links between workers and coordinator."""
    profiles: Path | None = None
    lease_s: float = 30.0
    publish_every: int = 10
    save_every_s: float = 60.0
    patience_s: float = 600.0
    """How long a worker looks for its coordinator."""
    look_every_s: float = 0.5
    """Least time between two views of the run."""
    coordinator_options: tuple[str, ...] = ()
    worker_options: tuple[str, ...] = ()
    own_disk: bool = False
    """Whether what the coordinator writes lies on a file system of its own, where this process may mount one."""


class Stand:
    """The processes of one training, and where their files are."""

    def __init__(self, settings: StandSettings, ground: Ground, directory: Path, disk: Disk | None = None) -> None:
        """:param disk: for all that the coordinator writes."""
        self.settings, self.ground, self.directory, self.disk = settings, ground, directory, disk
        self.out = (directory if disk is None else disk.path) / "out"
        self.journal = Journal(self.out / "rounds" / NAME)
        self.coordinator = self._program(
            "coordinator",
            COORDINATOR,
            *("coordinate", "--config", str(settings.config), *self._data, "--out", str(self.out)),
            *("--listen", ground.address, "--lease", str(settings.lease_s)),
            *("--publish-every", str(settings.publish_every), "--threads", "1"),
            *settings.coordinator_options,
        )
        self.workers = {name: self.worker(name, self.state(name)) for name in self.names}
        self.watch: Watch | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers."""
        return tuple(f"w{number}" for number in range(len(self.settings.parts)))

    def node(self, name: str) -> str:
        """The lab's node that a worker is in."""
        return worker_node(self.names.index(name))

    def part(self, name: str) -> int:
        return self.settings.parts[self.names.index(name)]

    def state(self, name: str) -> Path:
        """The directory in which a worker keeps its state."""
        return self.directory / name

    def worker(self, name: str, state: Path, label: str = "") -> Program:
        """A worker in the place of `name`, with a state directory; `label` names its log where it is not the first."""
        return self._program(
            label or name,
            self.node(name),
            *("work", "--coordinator", self.ground.address, *self._data, "--name", name),
            *("--block", str(self.part(name)), "--state", str(state), "--wait", "--threads", "1"),
            *("--save-every", str(self.settings.save_every_s), "--patience", str(self.settings.patience_s)),
            *self.settings.worker_options,
        )

    def beside(self, node: str, name: str, command: list[str]) -> Program:
        """Any other command that runs in a node of the stand."""
        return Program(name, self.ground.command(node, command), self.directory / f"{name}.log")

    def start(self) -> None:
        """Start what does not run, and watch it."""
        self.coordinator.start()
        for worker in self.workers.values():
            worker.start()
        if self.watch is None:
            look = ["rounds", self.ground.address, "--json", "--interval", str(self.settings.look_every_s)]
            command = [sys.executable, *MODULE, *look, *self.ground.options]
            self.watch = Watch(self.ground.command(COORDINATOR, command), self.directory / "watch.log")

    def set_cut(self, name: str, cut: bool) -> None:
        """Drop every packet between a worker and the coordinator, or carry them again."""
        self.ground.set_cut(self.node(name), cut)

    def wait_until(self, happened: Callable[[], bool], within_s: float) -> bool:
        """Whether something came about in time; the journal is read meanwhile. Raises ServiceError."""
        deadline = time.monotonic() + within_s
        while True:
            self.journal.look()
            if happened():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)

    def wait_end(self, patience_s: float) -> bool:
        """Whether the run comes to its end, and every worker hears of it; False when nothing happens for so long.

        Raises ServiceError with the last words of one that failed.
        """
        programs = [self.coordinator, *self.workers.values()]
        moved, known = time.monotonic(), -1
        while any(program.ended is None for program in programs):
            self.check()
            self.journal.look()
            if (now := sum(p.ended is not None for p in programs) + len(self.journal.entries)) != known:
                moved, known = time.monotonic(), now
            if time.monotonic() - moved > patience_s:
                return False
            time.sleep(POLL_S)
        self.check()
        self.journal.look()
        return True

    def check(self) -> None:
        """Raise ServiceError with the last words of a process that ended, other than as it should."""
        for program in (self.coordinator, *self.workers.values()):
            if program.ended:
                raise ServiceError(f"{program.name} ended ({program.ended}): {program.last_words()}")

    def close(self) -> None:
        """End everything at once: what was accepted is stored, and nobody goes on."""
        if self.watch is not None:
            self.watch.close()
        for program in (*self.workers.values(), self.coordinator):
            program.kill()

    @property
    def _data(self) -> tuple[str, ...]:
        return () if self.settings.data is None else ("--data", str(self.settings.data))

    def _program(self, name: str, node: str, *arguments: str) -> Program:
        return self.beside(node, name, [sys.executable, *MODULE, *arguments, *self.ground.options])


@contextlib.contextmanager
def open_stand(settings: StandSettings) -> Iterator[Stand]:
    """A stand whose processes are not started yet; they, and their files, go with the `with` block.

    Raises OnesweepError where no lab can be made.
    """
    directory = Path(tempfile.mkdtemp(prefix="onesweep-training-"))
    try:
        with contextlib.ExitStack() as under:
            ground = under.enter_context(open_ground(settings.profile, len(settings.parts), settings.profiles))
            disk = under.enter_context(open_disk(directory / "disk")) if settings.own_disk else None
            stand = Stand(settings, ground, directory, disk)
            under.callback(stand.close)
            yield stand
    finally:
        shutil.rmtree(directory, ignore_errors=True)
