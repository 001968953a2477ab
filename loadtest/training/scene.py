"""A training that is being broken: the stand, and what stands in for its workers for a while."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.load.target import LOOPBACK
from loadtest.training.program import Program
from loadtest.training.stand import Stand
from loadtest.training.witness import STATE, Witness
from stages.errors import OnesweepError
from stages.manifest import read_manifest

SABOTEUR = ("-P", "-m", "loadtest.training.saboteur")
CAUGHT_S = 30.0
"""How long a transfer of a worker is waited for, to be cut in its middle."""
GLANCE_S = 0.005
KEPT_NORMS = 16


@dataclass
class Scene:
    """What faults are done to."""

    stand: Stand
    sequences: int
    """That a worker reads in a step."""
    witness: Witness
    others: dict[str, Program] = field(default_factory=dict)
    """Twins and saboteurs, by the worker whose name they bear."""
    logs: dict[str, list[Path]] = field(default_factory=dict)
    """Of twins, by worker."""
    sabotage: list[Path] = field(default_factory=list)
    """What saboteurs wrote of their updates."""
    notes: list[str] = field(default_factory=list)
    """What the fault that is under way has to say."""

    @property
    def has_links(self) -> bool:
        return self.stand.settings.profile != LOOPBACK

    def look(self) -> None:
        """Read what is new in the log and in the workers' states. Raises ServiceError."""
        self.stand.journal.look()
        self.witness.look({name: self.stand.state(name) for name in self.stand.names})

    def kept(self, name: str) -> Path:
        """Where an old state of a worker is kept."""
        return self.stand.directory / f"{name}-old"

    def keep(self, name: str) -> None:
        """Copy a worker's state as it is now. What it waits to hand in is whole in there, or not at all."""
        self._copy(self.stand.state(name), self.kept(name))

    def put_back(self, name: str) -> None:
        """Give a worker that does not run its old state."""
        self.witness.look({name: self.stand.state(name)})
        self._copy(self.kept(name), self.stand.state(name))

    def start_twin(self, name: str) -> None:
        """Another process with a worker's name and a copy of its state."""
        number = len(self.logs.setdefault(name, [])) + 1
        state = self.stand.directory / f"{name}-twin-{number}"
        self._copy(self.stand.state(name), state)
        twin = self.stand.worker(name, state, f"{name}-twin-{number}")
        self.logs[name].append(twin.log)
        self.others[name] = twin
        twin.start()

    def start_saboteur(self, name: str, lie: str, count: int) -> None:
        """A saboteur in a worker's place, which must be empty."""
        stand, part = self.stand, self.stand.part(name)
        command = [
            *(sys.executable, *SABOTEUR, "--coordinator", stand.ground.address, "--name", name, "--lie", lie),
            *("--part", str(part), "--digest", read_manifest(stand.out).data["train_sha256"]),
            *("--norm", repr(self._usual_norm(name)), "--sequences", str(self.sequences), "--count", str(count)),
        ]
        label = f"{name}-saboteur-{len(self.sabotage) + 1}"
        program = stand.beside(stand.node(name), label, command)
        self.sabotage.append(program.log)
        self.others[name] = program
        program.start()

    def end_other(self, name: str) -> None:
        """End the twin or saboteur of a worker."""
        self.others.pop(name).kill()

    def wait_for_transfer(self, name: str) -> None:
        """Until something of a worker is on its way, in either direction; or long enough."""
        deadline = time.monotonic() + CAUGHT_S
        while time.monotonic() < deadline:
            for way, pattern in (("up", self._incoming(name)), ("down", self.stand.state(name) / "incoming" / "*")):
                if any(pattern.parent.glob(pattern.name)):
                    self.notes.append(f"in the middle of its way {way}")
                    return
            time.sleep(GLANCE_S)
        self.notes.append("nothing was on its way")

    def verdicts(self) -> list[dict[str, Any]]:
        """What became of each update of a saboteur."""
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

    def _incoming(self, name: str) -> Path:
        """What has come of a worker's update lies there at the coordinator."""
        view = self.stand.watch.last if self.stand.watch is not None else None
        worker = view.worker(name) if view is not None else None
        replica = worker.replica if worker is not None else "*"
        return self.stand.out / "rounds" / "incoming" / f"{self.stand.part(name)}-{replica}.*"

    def _usual_norm(self, name: str) -> float:
        """Of what a worker handed in lately, or anybody did."""
        taken = [entry.record for entry in self.stand.journal.entries if entry.kind == "accepted"]
        norms = [record["norm"] for record in taken if record["worker"] == name] or [r["norm"] for r in taken]
        if not norms:
            raise OnesweepError("nothing was accepted yet: a saboteur does not know how long an update is")
        return statistics.median(norms[-KEPT_NORMS:])

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        """A state, and nothing else: locks and half transfers are not anybody else's."""
        target.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # nothing saved yet
            shutil.copyfile(source / STATE, target / STATE)
