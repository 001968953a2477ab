"""Faults of a training, and the processes that stand in for its workers while they last."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.faults.base import Conditions, Fault, no_link
from loadtest.faults.process import Program
from loadtest.faults.proof import STATE, StateReader
from loadtest.faults.training_testbed import TrainingTestbed
from stages.checkpoint.manifest import read_manifest
from stages.errors import OnesweepError

COORDINATOR = "coordinator"
BYZANTINE_WORKER = ("-P", "-m", "loadtest.faults.byzantine_worker")
LIES_TOLD, LIE_S = 2, 120.0  # updates of a byzantine worker, and how long it may take to hand them in
CAUGHT_S = 30.0  # how long a transfer of a worker is waited for, to be cut in its middle
GLANCE_S = 0.005
KEPT_NORMS = 16


@dataclass
class FaultyTraining:
    """A training and its stand-ins; `target` is the name of a worker, or COORDINATOR."""

    testbed: TrainingTestbed
    sequences: int  # that a worker reads in a step
    states: StateReader
    # Twins and byzantine workers, by the worker whose name they bear.
    others: dict[str, Program] = field(default_factory=dict)
    logs: dict[str, list[Path]] = field(default_factory=dict)  # of twins, by worker
    # Logs of byzantine workers, with a line for each of their updates.
    sabotage: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # about the fault that is under way

    def look(self) -> None:
        """Read what is new in the log and in the workers' states. Raises ServiceError."""
        self.testbed.log.look()
        self.states.look({name: self.testbed.state(name) for name in self.testbed.names})

    def kill(self, target: str) -> None:
        self._program(target).kill()

    def start(self, target: str) -> None:
        self._program(target).start()

    def freeze(self, target: str) -> None:
        self._program(target).freeze()

    def thaw(self, target: str) -> None:
        self._program(target).thaw()

    def cut(self, target: str) -> None:
        self.testbed.set_cut(target, True)

    def mend(self, target: str) -> None:
        self.testbed.set_cut(target, False)

    def wait_for_transfer(self, target: str) -> None:
        """Wait until something of a worker is on its way, in either direction; or CAUGHT_S."""
        deadline = time.monotonic() + CAUGHT_S
        down = self.testbed.state(target) / "incoming" / "*"
        while time.monotonic() < deadline:
            for way, pattern in (("up", self._incoming(target)), ("down", down)):
                if any(pattern.parent.glob(pattern.name)):
                    self.notes.append(f"in the middle of its way {way}")
                    return
            time.sleep(GLANCE_S)
        self.notes.append("nothing was on its way")

    def keep_state(self, target: str) -> None:
        """Copy a worker's state as it is now. The update that it waits to hand in is whole in there, or not at all."""
        _copy(self.testbed.state(target), self._kept(target))

    def put_back(self, target: str) -> None:
        """Kill a worker, and give it the state that was kept, as from a restored backup."""
        self.kill(target)
        self.states.look({target: self.testbed.state(target)})
        _copy(self._kept(target), self.testbed.state(target))

    def start_twin(self, target: str) -> None:
        """Start another process with a worker's name and a copy of its state."""
        number = len(self.logs.setdefault(target, [])) + 1
        label = f"{target}-twin-{number}"
        _copy(self.testbed.state(target), self.testbed.directory / label)
        twin = self.others[target] = self.testbed.worker(target, self.testbed.directory / label, label)
        self.logs[target].append(twin.log)
        twin.start()

    def end_twin(self, target: str) -> None:
        self.others.pop(target).kill()

    def start_byzantine(self, target: str, lie: str) -> None:
        """Put a byzantine worker in a worker's place."""
        self.kill(target)
        testbed = self.testbed
        command = [
            *(sys.executable, *BYZANTINE_WORKER, "--coordinator", testbed.address, "--name", target, "--lie", lie),
            *("--part", str(testbed.part(target)), "--digest", read_manifest(testbed.out).data["train_sha256"]),
            *("--norm", repr(self._usual_norm(target)), "--sequences", str(self.sequences)),
            *("--count", str(LIES_TOLD)),
        ]
        label = f"{target}-saboteur-{len(self.sabotage) + 1}"
        program = self.others[target] = testbed.beside(testbed.node(target), label, command)
        self.sabotage.append(program.log)
        program.start()

    def has_lied(self, target: str) -> bool:
        """True when a byzantine worker has handed in its updates."""
        return self.others[target].ended is not None

    def end_byzantine(self, target: str) -> None:
        self.others.pop(target).kill()
        self.start(target)

    def fill_disk(self, target: str) -> None:
        """Leave the coordinator no room. Without a disk of its own none of its files may grow (EFBIG)."""
        if self.testbed.disk is None:
            self.testbed.coordinator.limit_files(0)
            self.notes.append("no file can grow: RLIMIT_FSIZE, EFBIG")
        else:
            self.notes.append("no room on a tmpfs of its own: ENOSPC")
            self.testbed.disk.fill()

    def keep_disk_full(self, target: str) -> None:
        """Take the room that the coordinator has made by removing files."""
        if self.testbed.disk is not None:
            self.testbed.disk.fill()

    def free_disk(self, target: str) -> None:
        if self.testbed.disk is None:
            self.testbed.coordinator.limit_files(None)
        else:
            self.testbed.disk.free()

    def verdicts(self) -> list[dict[str, Any]]:
        """The coordinator's verdict on each update of a byzantine worker."""
        found = []
        for log in self.sabotage:
            for line in log.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    if isinstance(record := json.loads(line), dict):
                        found.append(record)
        return found

    def close(self) -> None:
        for other in self.others.values():
            other.kill()

    def _program(self, target: str) -> Program:
        return self.testbed.coordinator if target == COORDINATOR else self.testbed.workers[target]

    def _kept(self, target: str) -> Path:
        return self.testbed.directory / f"{target}-old"

    def _incoming(self, target: str) -> Path:
        """The files of the half of a worker's update that the coordinator has."""
        view = self.testbed.view
        worker = view.worker(target) if view is not None else None
        replica = worker.replica if worker is not None else "*"
        return self.testbed.out / "rounds" / "incoming" / f"{self.testbed.part(target)}-{replica}.*"

    def _usual_norm(self, target: str) -> float:
        """The norm of the updates that a worker handed in lately, or else of all."""
        taken = [entry.record for entry in self.testbed.log.entries if entry.kind == "accepted"]
        norms = [record["norm"] for record in taken if record["worker"] == target] or [r["norm"] for r in taken]
        if not norms:
            raise OnesweepError("nothing was accepted yet: a saboteur does not know how long an update is")
        return statistics.median(norms[-KEPT_NORMS:])


def _copy(source: Path, target: Path) -> None:
    """Copy a state and nothing else: locks and half transfers belong to one process."""
    target.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # nothing saved yet
        shutil.copyfile(source / STATE, target / STATE)


def _the_workers(training: FaultyTraining) -> tuple[str, ...]:
    return training.testbed.names


def _the_coordinator(training: FaultyTraining) -> tuple[str, ...]:
    return (COORDINATOR,)


def _not_fp32(conditions: Conditions) -> str:
    codec = conditions.codec
    return "" if codec == "fp32" else f"a saboteur speaks fp32, and updates travel as {codec}"


def _lie(name: str) -> Fault[FaultyTraining]:
    def begin(training: FaultyTraining, target: str) -> None:
        training.start_byzantine(target, name)

    return Fault(
        name,
        (LIE_S, LIE_S),
        begin,
        FaultyTraining.end_byzantine,
        _the_workers,
        colour="#e69f00",
        absent=_not_fp32,
        over=FaultyTraining.has_lied,
    )


TRAINING_WORDS = {
    "kill": "a worker gets SIGKILL, and starts again later",
    "freeze": "a worker gets SIGSTOP for longer than its lease",
    "cut": "a worker's link is cut in the middle of a transfer",
    "twin": "a second process works with a worker's name and a copy of its state",
    "old-state": "a worker is killed, and starts again with a state from long ago",
    "nan": "a saboteur in a worker's place hands in updates of NaN",
    "absurd": "a saboteur hands in updates a thousand times too long",
    "scaled": "a saboteur hands in updates five times too long",
    "flipped": "a saboteur hands in updates that point back",
    "coordinator": "the coordinator gets SIGKILL, and starts again later",
    "disk": "the coordinator's disk is full",
}
_ALL: tuple[Fault[FaultyTraining], ...] = (
    Fault("kill", (1.0, 4.0), FaultyTraining.kill, FaultyTraining.start, _the_workers, weight=3, colour="#d55e00"),
    # it wakes up in a later round, and does not know it
    Fault(
        "freeze",
        (1.3, 2.0),
        FaultyTraining.freeze,
        FaultyTraining.thaw,
        _the_workers,
        weight=2,
        colour="#0072b2",
        in_leases=True,
    ),
    Fault(
        "cut",
        (3.0, 8.0),
        FaultyTraining.cut,
        FaultyTraining.mend,
        _the_workers,
        weight=2,
        colour="#cc79a7",
        absent=no_link,
        prepare=FaultyTraining.wait_for_transfer,
    ),
    Fault("twin", (10.0, 15.0), FaultyTraining.start_twin, FaultyTraining.end_twin, _the_workers, colour="#009e73"),
    Fault("old-state", (0.5, 2.0), FaultyTraining.put_back, FaultyTraining.start, _the_workers, colour="#56b4e9"),
    _lie("nan"),
    _lie("absurd"),
    _lie("scaled"),
    _lie("flipped"),
    Fault(
        "coordinator",
        (0.5, 4.0),
        FaultyTraining.kill,
        FaultyTraining.start,
        _the_coordinator,
        weight=3,
        colour="#222222",
    ),
    Fault(
        "disk",
        (5.0, 10.0),
        FaultyTraining.fill_disk,
        FaultyTraining.free_disk,
        _the_coordinator,
        hold=FaultyTraining.keep_disk_full,
    ),
)
TRAINING_FAULTS: Mapping[str, Fault[FaultyTraining]] = {fault.name: fault for fault in _ALL}
