"""Faults of a training, and the processes that stand in for its workers while they last."""

import contextlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from loadtest.faults.base import Conditions, Fault, no_link
from loadtest.faults.process import Disk, Program
from loadtest.faults.settings import RunFile
from loadtest.faults.training_testbed import COORDINATOR_NODE, TrainingSetup, TrainingTestbed
from loadtest.workload.testbed import Network
from stages.checkpoint.manifest import read_manifest
from stages.errors import OnesweepError

COORDINATOR = "coordinator"
BYZANTINE_WORKER = ("-P", "-m", "loadtest.faults.byzantine_worker")
LIES_TOLD, LIE_S = 2, 120.0  # updates of a byzantine worker, and how long it may take to hand them in
STATE = "worker.safetensors"  # as a worker names it
CAUGHT_S = 30.0  # how long a transfer of a worker is waited for, to be cut in its middle
GLANCE_S = 0.005
KEPT_NORMS = 16


class FaultyTraining(TrainingTestbed):
    """A training and its stand-ins; `target` is the name of a worker, or COORDINATOR."""

    def __init__(
        self, run: RunFile, setup: TrainingSetup, network: Network, directory: Path, disk: Disk | None
    ) -> None:
        super().__init__(setup, network, directory, disk)
        self.sequences = run.sequences  # that a worker reads in a step
        # Twins and byzantine workers, by the worker whose name they bear.
        self.others: dict[str, Program] = {}
        self.logs: dict[str, list[Path]] = {}  # of twins, by worker
        self.sabotage: list[Path] = []  # logs of byzantine workers, with a line for each of their updates
        self.notes: list[str] = []  # about the fault that is under way

    def program(self, target: str) -> Program:
        return self.coordinator if target == COORDINATOR else self.workers[target]

    def set_cut(self, target: str, cut: bool) -> None:
        """Drop every packet between a worker and the coordinator, or carry them again. Raises LabError."""
        self.network.alter(COORDINATOR_NODE, self.node(target), loss=1.0 if cut else None)

    def wait_for_transfer(self, target: str) -> None:
        """Wait until something of a worker is on its way, in either direction; or CAUGHT_S."""
        deadline = time.monotonic() + CAUGHT_S
        down = self.state(target) / "incoming" / "*"
        while time.monotonic() < deadline:
            for way, pattern in (("up", self._incoming(target)), ("down", down)):
                if any(pattern.parent.glob(pattern.name)):
                    self.notes.append(f"in the middle of its way {way}")
                    return
            time.sleep(GLANCE_S)
        self.notes.append("nothing was on its way")

    def keep_state(self, target: str) -> None:
        """Copy a worker's state as it is now. The update that it waits to hand in is whole in there, or not at all."""
        _copy(self.state(target), self._kept(target))

    def put_back(self, target: str) -> None:
        """Kill a worker, and give it the state that was kept, as from a restored backup."""
        self.workers[target].kill()
        _copy(self._kept(target), self.state(target))

    def start_twin(self, target: str) -> None:
        """Start another process with a worker's name and a copy of its state."""
        number = len(self.logs.setdefault(target, [])) + 1
        label = f"{target}-twin-{number}"
        _copy(self.state(target), self.directory / label)
        twin = self.others[target] = self.worker(target, self.directory / label, label)
        self.logs[target].append(twin.log)
        twin.start()

    def end_twin(self, target: str) -> None:
        self.others.pop(target).kill()

    def start_byzantine(self, target: str, lie: str) -> None:
        """Put a byzantine worker in a worker's place."""
        self.workers[target].kill()
        command = [
            *(sys.executable, *BYZANTINE_WORKER, "--coordinator", self.address, "--name", target, "--lie", lie),
            *("--part", str(self.part(target)), "--digest", read_manifest(self.out).data["train_sha256"]),
            *("--norm", repr(self._usual_norm(target)), "--sequences", str(self.sequences)),
            *("--count", str(LIES_TOLD)),
        ]
        label = f"{target}-saboteur-{len(self.sabotage) + 1}"
        program = self.others[target] = self.beside(self.node(target), label, command)
        self.sabotage.append(program.log)
        program.start()

    def end_byzantine(self, target: str) -> None:
        self.others.pop(target).kill()
        self.workers[target].start()

    def fill_disk(self, target: str) -> None:
        """Leave the coordinator no room. Without a disk of its own none of its files may grow (EFBIG)."""
        if self.disk is None:
            self.coordinator.limit_files(0)
            self.notes.append("no file can grow: RLIMIT_FSIZE, EFBIG")
        else:
            self.notes.append("no room on a tmpfs of its own: ENOSPC")
            self.disk.fill()

    def free_disk(self, target: str) -> None:
        if self.disk is None:
            self.coordinator.limit_files(None)
        else:
            self.disk.free()

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
        super().close()

    def _kept(self, target: str) -> Path:
        return self.directory / f"{target}-old"

    def _incoming(self, target: str) -> Path:
        """The files of the half of a worker's update that the coordinator has."""
        view = self.view
        worker = view.worker(target) if view is not None else None
        replica = worker.replica if worker is not None else "*"
        return self.out / "rounds" / "incoming" / f"{self.part(target)}-{replica}.*"

    def _usual_norm(self, target: str) -> float:
        """The norm of the updates that a worker handed in lately, or else of all."""
        taken = [entry.record for entry in self.log.entries if entry.kind == "accepted"]
        norms = [record["norm"] for record in taken if record["worker"] == target] or [r["norm"] for r in taken]
        if not norms:
            raise OnesweepError("nothing was accepted yet: a saboteur does not know how long an update is")
        return statistics.median(norms[-KEPT_NORMS:])


def _copy(source: Path, target: Path) -> None:
    """Copy a state and nothing else: locks and half transfers belong to one process."""
    target.mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # nothing saved yet
        shutil.copyfile(source / STATE, target / STATE)


def _not_fp32(conditions: Conditions) -> str:
    codec = conditions.codec
    return "" if codec == "fp32" else f"a saboteur speaks fp32, and updates travel as {codec}"


_WORKERS: Callable[[FaultyTraining], tuple[str, ...]] = attrgetter("names")


def _the_coordinator(training: FaultyTraining) -> tuple[str, ...]:
    return (COORDINATOR,)


def _kill(training: FaultyTraining, target: str) -> None:
    training.program(target).kill()


def _start(training: FaultyTraining, target: str) -> None:
    training.program(target).start()


def _lie(name: str) -> Fault[FaultyTraining]:
    return Fault(
        name,
        (LIE_S, LIE_S),
        lambda training, target: training.start_byzantine(target, name),
        FaultyTraining.end_byzantine,
        _WORKERS,
        absent=_not_fp32,
        over=lambda training, target: training.others[target].ended is not None,  # its updates are handed in
    )


_ALL: tuple[Fault[FaultyTraining], ...] = (
    Fault("kill", (1.0, 4.0), _kill, _start, _WORKERS, weight=3),
    # it wakes up in a later round, and does not know it
    Fault(
        "freeze",
        (1.3, 2.0),
        lambda training, target: training.workers[target].freeze(),
        lambda training, target: training.workers[target].thaw(),
        _WORKERS,
        weight=2,
        in_leases=True,
    ),
    Fault(
        "cut",
        (3.0, 8.0),
        lambda training, target: training.set_cut(target, True),
        lambda training, target: training.set_cut(target, False),
        _WORKERS,
        weight=2,
        absent=no_link,
        prepare=FaultyTraining.wait_for_transfer,
    ),
    Fault("twin", (10.0, 15.0), FaultyTraining.start_twin, FaultyTraining.end_twin, _WORKERS),
    Fault("old-state", (0.5, 2.0), FaultyTraining.put_back, _start, _WORKERS),
    *(_lie(name) for name in ("nan", "absurd", "scaled", "flipped", "kept-back")),
    Fault("coordinator", (0.5, 4.0), _kill, _start, _the_coordinator, weight=3),
    Fault(
        "disk",
        (5.0, 10.0),
        FaultyTraining.fill_disk,
        FaultyTraining.free_disk,
        _the_coordinator,
        # it makes room by removing files
        hold=lambda training, target: training.disk.fill() if training.disk is not None else None,
    ),
)
TRAINING_FAULTS: Mapping[str, Fault[FaultyTraining]] = {fault.name: fault for fault in _ALL}
