"""One run of `chaos training`: without faults, then with them, then the proof."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.chaos.schedule import Kind, Planned, make_schedule
from loadtest.training.account import Happened, refusals, with_waits
from loadtest.training.faults import COORDINATOR, FAULTS, FullDisk
from loadtest.training.journal import Entry
from loadtest.training.proof import Proof, prove
from loadtest.training.reference import (
    Reference,
    Scores,
    evaluate,
    final_nats,
    make_reference,
    read_reference,
    write_reference,
)
from loadtest.training.scene import Scene
from loadtest.training.settings import RunFile, TrainingChaosSettings, check_settings
from loadtest.training.stand import POLL_S, Stand, StandSettings, open_stand
from loadtest.training.witness import Witness, handed_in
from serving.deployment import MODULE
from stages.errors import ServiceError

AIM_NATS = 0.03
"""How much worse than undisturbed the end may be."""
FIRST_ROUNDS = 2
"""Rounds of every part before the first fault: by then everybody has something to lose."""
FIRST_SHARE, LAST_SHARE = 0.02, 0.9
"""Of the run's merges, between which faults begin."""
SOUND_S = 60.0
"""How long the next fault waits until the part that the last one hit has merged again."""
LEAVE_S = 40.0
"""How long workers have to hear that the run is over."""
THOUSANDTHS = 1000.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainingResult:
    """What a run came to. Times are seconds of the monotonic clock."""

    settings: TrainingChaosSettings
    run: RunFile
    rounds: int
    reference: Reference
    scores: Scores
    happened: list[Happened]
    entries: list[Entry]
    proof: Proof
    audit: str
    """What `onesweep train audit` said."""
    sound: bool
    """Whether it found nothing wrong."""
    finished: bool
    ended: dict[str, str]
    """Processes that had ended without a fault's doing, and their last words."""
    verdicts: list[dict[str, Any]]
    """What became of a saboteur's updates."""
    refused: Counter[str]
    """Why rounds of honest workers did not count."""
    left_out: tuple[str, ...]
    begin_s: float
    end_s: float

    @property
    def gap_nats(self) -> float | None:
        """How much worse than undisturbed; None where there is nothing to compare."""
        return final_nats(self.scores) - final_nats(self.reference.scores) if self.scores else None

    @property
    def trouble(self) -> int:
        """What no run may have."""
        off = self.gap_nats is None or not self.gap_nats <= AIM_NATS
        return len(self.proof.problems) + len(self.ended) + (not self.sound) + (not self.finished) + off


def run_training_chaos(settings: TrainingChaosSettings, say: Say) -> TrainingResult:
    """Raises OnesweepError when no training can be set up."""
    run = check_settings(settings)
    with tempfile.TemporaryDirectory(prefix="onesweep-run-") as folder:
        config = Path(folder) / "run.toml"
        config.write_text(run.text, encoding="utf-8")
        workers = tuple(part for part in range(run.parts) for _ in range(run.replicas))
        stand_settings = StandSettings(
            config,
            settings.data,
            workers,
            settings.profile,
            settings.profiles,
            lease_s=settings.lease_s,
            publish_every=5,
            save_every_s=1.0,
            own_disk=FullDisk.name in settings.able(run.codec),
        )
        reference = _reference(settings, run, stand_settings, say)
        with open_stand(stand_settings) as stand:
            return Disturbed(settings, run, stand, reference, say).result()


def _reference(settings: TrainingChaosSettings, run: RunFile, stand: StandSettings, say: Say) -> Reference:
    key = settings.reference_key(run.text)
    if settings.reference is not None and (known := read_reference(settings.reference, key)):
        return known
    made = make_reference(stand, key, settings.patience_s, say)
    say(f"  {made.seconds:.0f} s, {final_nats(made.scores):.3f} nats")
    if settings.reference is not None:
        write_reference(settings.reference, made)
    return made


class Disturbed:
    """The run with faults. On one thread: what it starts ends with that."""

    def __init__(
        self, settings: TrainingChaosSettings, run: RunFile, stand: Stand, reference: Reference, say: Say
    ) -> None:
        self.settings, self.run, self.stand, self.reference, self.say = settings, run, stand, reference, say
        self.scene = Scene(stand, run.sequences, Witness(run.codec))
        self.happened: list[Happened] = []
        self.ended: dict[str, str] = {}
        self.rounds = 0
        self.away: set[str] = set()
        """Programs that a fault has taken away for now."""
        self.moved_s, self._entries = time.monotonic(), 0

    def result(self) -> TrainingResult:
        """Raises ServiceError when the run does not even begin."""
        stand, begin_s = self.stand, time.monotonic()
        schedule = self._schedule()
        self.say(f"the run with {len(schedule)} faults ...")
        try:
            stand.start()
            self._begin()
            done = self._go_through(schedule, begin_s)
            finished = self._wait_end()
        finally:
            self.scene.close()
        end_s = time.monotonic()
        self.scene.look()
        directory, workers = stand.out / "rounds", stand.workers
        logs = {name: [workers[name].log, *self.scene.logs.get(name, [])] for name in stand.names}
        proof = prove(
            [entry.record for entry in stand.journal.entries],
            self.rounds,
            self.scene.witness.statements.values(),
            {name: handed_in(files) for name, files in logs.items()},
            directory,
        )
        sound, audit = _audit(directory)
        left_out = [f"fault {name}: {why}" for name in self.settings.kinds if (why := self._absence(name))]
        left_out += [f"{planned.kind} of {planned.target}: the run was over" for planned in schedule[done:]]
        return TrainingResult(
            self.settings,
            self.run,
            self.rounds,
            self.reference,
            evaluate(stand.out, self.settings.data) if finished else {},
            [with_waits(fault, stand.journal.entries) for fault in self.happened],
            stand.journal.entries,
            proof,
            audit,
            sound,
            finished,
            self.ended,
            self.scene.verdicts(),
            refusals(file for files in logs.values() for file in files),
            tuple(left_out),
            begin_s,
            end_s,
        )

    def _absence(self, name: str) -> str:
        return self.settings.absence(name, self.run.codec)

    def _schedule(self) -> list[Planned]:
        """Moments are thousandths of the time in which faults begin."""
        kinds = [
            Kind(fault.name, fault.weight, fault.length_s, fault.targets(self.stand.names))
            for fault in (FAULTS[name] for name in self.settings.able(self.run.codec))
        ]
        return make_schedule(kinds, THOUSANDTHS, self.settings.fault_count(self.run.codec), self.settings.seed)

    def _begin(self) -> None:
        """Until everybody is at work, and has a state to be kept. Raises ServiceError."""
        stand = self.stand
        while not stand.journal.entries or stand.watch is None or stand.watch.last is None:
            self._tick()
            if not self._alive():
                raise ServiceError(f"the run does not begin: {stand.coordinator.last_words()}")
        self.rounds = stand.watch.last.rounds
        parts = stand.journal.entries[0].record["parts"]
        while self._alive() and any(stand.journal.closed(part) < FIRST_ROUNDS for part in parts):
            self._tick()
        for name in stand.names:
            self.scene.keep(name)

    def _go_through(self, schedule: Sequence[Planned], begin_s: float) -> int:
        """Every fault when the run has come so far; returns how many there were."""
        for number, planned in enumerate(schedule):
            share = FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * planned.at_s / THOUSANDTHS
            while self._progress() < share and self._alive():
                self._tick()
            if self.stand.coordinator.ended is not None or not self._alive():
                return number
            self._do(planned, begin_s)
            last = self.happened[-1]
            deadline = time.monotonic() + SOUND_S
            while (
                time.monotonic() < deadline
                and self._alive()
                and with_waits(last, self._entries_since(last)).back_s is None
            ):
                self._tick()
        return len(schedule)

    def _do(self, planned: Planned, begin_s: float) -> None:
        fault, target, at_s = FAULTS[planned.kind], planned.target, time.monotonic()
        length_s = fault.scaled_s(planned.length_s, self.settings.lease_s)
        part = "" if target == COORDINATOR else f"block-{self.stand.part(target)}"
        self.say(f"  {at_s - begin_s:6.1f} s  {planned.kind} {target}, {100 * self._progress():.0f} % done")
        self.scene.notes.clear()
        self.away.add(target)
        fault.begin(self.scene, target)
        try:
            began_s = time.monotonic()
            while time.monotonic() - began_s < length_s and not fault.over(self.scene, target):
                fault.hold(self.scene, target)
                self._tick()
        finally:
            fault.end(self.scene, target)
        self.away.discard(target)
        self.happened.append(
            Happened(planned.kind, target, part, began_s, time.monotonic(), "; ".join(self.scene.notes))
        )

    def _entries_since(self, fault: Happened) -> list[Entry]:
        return [entry for entry in self.stand.journal.entries if entry.at_s > fault.begin_s]

    def _progress(self) -> float:
        """Share of the run's merges that are made."""
        closed = sum(entry.kind == "closed" for entry in self.stand.journal.entries)
        return closed / (self.rounds * self.run.parts)

    def _alive(self) -> bool:
        """Whether anything happened lately, or may yet."""
        return time.monotonic() - self.moved_s < self.settings.patience_s

    def _tick(self) -> None:
        time.sleep(POLL_S)
        self.scene.look()
        if len(self.stand.journal.entries) != self._entries:
            self._entries, self.moved_s = len(self.stand.journal.entries), time.monotonic()
        for program in (self.stand.coordinator, *self.stand.workers.values()):
            if program.name not in self.away and program.ended and self.stand.coordinator.ended != 0:
                self.ended[f"{program.name}, start {program.starts}"] = program.last_words()
                program.start()

    def _wait_end(self) -> bool:
        """Whether the run comes to its end."""
        while self.stand.coordinator.ended != 0:
            if not self._alive():
                return False
            self._tick()
        deadline = time.monotonic() + LEAVE_S
        while any(worker.ended is None for worker in self.stand.workers.values()) and time.monotonic() < deadline:
            self._tick()
        return True


def _audit(directory: Path) -> tuple[bool, str]:
    """Whether `onesweep train audit` finds nothing wrong, and its words."""
    command = [sys.executable, *MODULE, "train", "audit", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0, (done.stdout + done.stderr).strip()
