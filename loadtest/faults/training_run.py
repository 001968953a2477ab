"""One run of `bench chaos-training`: without faults, then with them, then what was lost."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.commands import BenchReport
from loadtest.faults.base import (
    FaultRecord,
    FaultRun,
    Planned,
    Say,
    Selection,
    fault_report,
    inflict,
    make_schedule,
    select,
)
from loadtest.faults.settings import SHIPPED_RUN, RunFile, TrainingChaosSettings
from loadtest.faults.training_testbed import (
    COORDINATOR,
    TRAINING_FAULTS,
    LogEntry,
    TrainingSetup,
    TrainingTestbed,
    open_training_testbed,
)
from loadtest.workload.testbed import check_links
from stages.errors import InputError, ServiceError
from stages.settings import read_toml
from trainer.rounds.service import STORE
from trainer.rounds.store import Audit, audit

FAULTS_A_MINUTE = 1.2
MOST_WORKERS = 60
AIM_NATS = 0.03  # how much worse than undisturbed the ends may be, in the mean over the seeds
FIRST_ROUNDS = 2  # rounds of every part before the first fault: by then every worker has something to lose
FIRST_SHARE, LAST_SHARE = 0.02, 0.9  # of the run's merges, between which faults begin
SOUND_S = 60.0  # how long the next fault waits until the part that the last one hit has merged again
LEAVE_S = 40.0  # how long workers have to hear that the run is over
THOUSANDTHS = 1000.0
NEXT_BYTE = "next_byte"  # the loss of the model's end; those of its blocks have a name before it
MAX_SEEDS = 10

Scores = dict[str, float]  # nats a byte of validation text, by the names that the manifest gives them


def recovered(fault: FaultRecord, entries: Sequence[LogEntry]) -> bool:
    """True once an update of a fault's target was accepted after its end; of any worker's for the coordinator."""
    accepted = (entry for entry in entries if entry.kind == "accepted" and entry.at_s > fault.end_s)
    return any(fault.target in (COORDINATOR, entry.record["worker"]) for entry in accepted)


HANDED_IN = re.compile(r"round (\d+) of (\S+) is handed in")


def handed_in(log: Path) -> set[tuple[str, int]]:
    """Parts and rounds of which a worker heard that its update was taken, by its own log."""
    words = log.read_text(errors="replace") if log.exists() else ""
    return {(part, int(number)) for number, part in HANDED_IN.findall(words)}


def lost_updates(entries: Sequence[LogEntry], heard: Mapping[str, set[tuple[str, int]]], rounds: int) -> list[str]:
    """Updates that only their worker knows to be taken; :param rounds: that each part should have made."""
    known = Counter(
        (entry.record["worker"], entry.part, entry.record["round"])
        for entry in entries
        if entry.kind in ("accepted", "dropped")
    )
    closed = Counter(entry.part for entry in entries if entry.kind == "closed")
    parts = entries[0].record["parts"] if entries else {}
    return [
        *(f"{part} made {closed[part]} rounds of {rounds}" for part in parts if closed[part] != rounds),
        *(
            f"{worker} heard that round {number} of {part} was taken: it is known {known[worker, part, number]} times"
            for worker, taken in heard.items()
            for part, number in sorted(taken)
            if known[worker, part, number] != 1
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class TrainingResult(FaultRun):
    """A run's events and scores."""

    seed: int  # of the training
    parts: int
    rounds: int
    undisturbed: Scores
    undisturbed_s: float
    scores: Scores  # empty where the run had no end
    entries: list[LogEntry]
    heard: int  # times that a worker's own log has an update as taken
    lost: list[str]  # a sentence for each update that the coordinator has not once, and each part that ended early
    audit: Audit

    @property
    def losses(self) -> int:
        """The number of things that no run may have."""
        return len(self.lost) + len(self.ended) + len(self.audit.problems) + (not self.scores)


def mean_gap(results: Sequence[TrainingResult]) -> float | None:
    """The ends less those undisturbed, in nats; None without an end of each."""
    if not all(each.scores for each in results):
        return None
    return statistics.mean(each.scores[NEXT_BYTE] - each.undisturbed[NEXT_BYTE] for each in results)


def check_training_chaos(settings: TrainingChaosSettings) -> tuple[RunFile, Selection[TrainingTestbed]]:
    """The first run and its faults. Raises OnesweepError for what can be refused before anything is started."""
    seeds, config = settings.seeds, settings.config or SHIPPED_RUN
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or len(seeds) > MAX_SEEDS:
        raise InputError(f"--seeds takes up to {MAX_SEEDS} different whole numbers of at least 0, not {seeds}")
    if "seed" in read_toml(config):
        raise InputError(f"{config} has a seed; leave it out, --seeds says it")
    settings = settings.runs()[0]
    run = RunFile.read(settings.config, settings.minutes)
    run = replace(run, text=f"seed = {settings.seeds[0]}\n{run.text}")  # TOML has it before its first section
    if run.model != "chain":
        raise InputError(f"{config}: faults are for the training of a chain, not of {run.model!r}")
    if run.fragments != 1:
        raise InputError(f"{config}: faults are for parts that travel whole, not in {run.fragments} fragments")
    if not 1 <= len(run.workers) <= MOST_WORKERS:
        raise InputError(f"{run.parts} parts of {run.replicas} workers; at most {MOST_WORKERS} find room here")
    selection = select(TRAINING_FAULTS, settings, FAULTS_A_MINUTE)
    if settings.data is not None and not settings.data.exists():
        raise InputError(f"no text at {settings.data}: give a file or a folder of UTF-8 text")
    check_links(settings.profile, len(run.workers), settings.profiles)
    return run, selection


def train_under_faults(settings: TrainingChaosSettings, say: Say) -> list[TrainingResult]:
    """A result for each seed. Raises OnesweepError when no training can be set up."""
    return [_run_seed(each, say) for each in settings.runs()]


def _run_seed(settings: TrainingChaosSettings, say: Say) -> TrainingResult:
    run, selection = check_training_chaos(settings)
    with tempfile.TemporaryDirectory(prefix="onesweep-run-") as folder:
        config = Path(folder) / "run.toml"
        config.write_text(run.text, encoding="utf-8")
        setup = TrainingSetup(
            *(config, settings.data, run.workers, settings.profile, settings.profiles),
            lease_s=settings.lease_s,
        )
        say("the same run without faults ...")
        begin_s = time.monotonic()
        with open_training_testbed(setup) as testbed:
            testbed.start()
            testbed.wait_end(settings.patience_s)
            undisturbed, undisturbed_s = final_scores(testbed.out), time.monotonic() - begin_s
        say(f"  {undisturbed_s:.0f} s, {undisturbed[NEXT_BYTE]:.3f} nats")
        with open_training_testbed(setup) as training:
            return _DisturbedRun(settings, run, selection, training, say).result(undisturbed, undisturbed_s)


def final_scores(checkpoint: Path) -> Scores:
    """The losses that the coordinator measured on validation text at the end of the run."""
    metrics = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    return {name: nats for name, nats in metrics["valid"].items() if name.endswith(NEXT_BYTE)}


@dataclass
class _DisturbedRun:
    """The run with faults. On one thread: processes in a lab end with the thread that started them."""

    settings: TrainingChaosSettings
    run: RunFile
    selection: Selection[TrainingTestbed]
    training: TrainingTestbed
    say: Say

    def __post_init__(self) -> None:
        self.faults: list[FaultRecord] = []
        self.ended: dict[str, str] = {}
        self.away = ""  # the program that a fault has taken away for now

    def result(self, undisturbed: Scores, undisturbed_s: float) -> TrainingResult:
        """Raises ServiceError when the run does not even begin."""
        training, begin_s = self.training, time.monotonic()
        # moments are thousandths of the time in which faults begin
        chosen, s = self.selection, self.settings
        schedule = make_schedule(chosen.able, training, THOUSANDTHS, chosen.count, s.seed, s.length_scale)
        self.say(f"the run with {len(schedule)} faults ...")
        try:
            training.start()
            self._begin()
            done = self._go_through(schedule, begin_s)
            finished = self._wait_end()
        finally:
            training.close()
        end_s = time.monotonic()
        training.log.look()
        entries = training.log.entries
        heard = {name: handed_in(worker.log) for name, worker in training.workers.items()}
        over = [f"{planned.kind} of {planned.target}: the run was over" for planned in schedule[done:]]
        return TrainingResult(
            seed=s.seeds[0],
            parts=self.run.parts,
            rounds=self.run.rounds,
            undisturbed=undisturbed,
            undisturbed_s=undisturbed_s,
            scores=final_scores(training.out) if finished else {},
            faults=self.faults,
            entries=entries,
            heard=sum(map(len, heard.values())),
            lost=lost_updates(entries, heard, self.run.rounds),
            audit=audit(training.out / STORE),
            ended=self.ended,
            left_out=(*self.selection.left_out, *over),
            begin_s=begin_s,
            end_s=end_s,
        )

    def _begin(self) -> None:
        """Wait until every worker trains. Raises ServiceError."""
        training = self.training
        while not training.log.entries:
            self._tick()
            if not self._alive():
                raise ServiceError(f"the run does not begin: {training.coordinator.last_words()}")
        parts = training.log.entries[0].record["parts"]
        self._wait(lambda: all(training.log.closed(part) >= FIRST_ROUNDS for part in parts))

    def _go_through(self, schedule: Sequence[Planned], begin_s: float) -> int:
        """Every fault when the run has come so far; returns how many there were."""
        for number, planned in enumerate(schedule):
            share = FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * planned.at_s / THOUSANDTHS
            self._wait(lambda share=share: self._progress() >= share)  # type: ignore[misc]
            if self.training.coordinator.ended is not None or not self._alive():
                return number
            last, deadline = self._inflict(planned, begin_s), time.monotonic() + SOUND_S
            self._wait(
                lambda last=last, deadline=deadline: (  # type: ignore[misc]
                    time.monotonic() >= deadline or recovered(last, self.training.log.entries)
                )
            )
        return len(schedule)

    def _inflict(self, planned: Planned, begin_s: float) -> FaultRecord:
        fault, target = TRAINING_FAULTS[planned.kind], planned.target
        at_s = time.monotonic() - begin_s
        self.say(f"  {at_s:6.1f} s  {planned.kind} {target}, {100 * self._progress():.0f} % done")
        self.away = target
        self.faults.append(inflict(fault, self.training, target, planned.length_s, self._tick))
        self.away = ""
        return self.faults[-1]

    def _progress(self) -> float:
        """Share of the run's merges that are made."""
        closed = sum(entry.kind == "closed" for entry in self.training.log.entries)
        return closed / (self.run.rounds * self.run.parts)

    def _alive(self) -> bool:
        return self.training.is_alive(self.settings.patience_s)

    def _wait(self, happened: Callable[[], bool]) -> None:
        while not happened() and self._alive():
            self._tick()

    def _tick(self) -> None:
        self.training.tick()
        for program in self.training.programs:
            if program.name != self.away and program.ended and self.training.coordinator.ended != 0:
                self.ended[f"{program.name}, start {program.starts}"] = program.last_words()
                program.start()

    def _wait_end(self) -> bool:
        """False where the run comes to no end."""
        self._wait(lambda: self.training.coordinator.ended == 0)
        if self.training.coordinator.ended != 0:
            return False
        deadline = time.monotonic() + LEAVE_S
        while any(worker.ended is None for worker in self.training.workers.values()) and time.monotonic() < deadline:
            self._tick()
        return True


# The report


SHOWN = 8
SCORE_HEAD = ("seed", "nats a byte", "undisturbed", "with faults", "difference")


def training_report(results: Sequence[TrainingResult]) -> BenchReport:
    """The report of `bench chaos-training`."""
    record = {"verdict": verdict(results), "gap_nats": mean_gap(results), "runs": list(map(run_record, results))}
    tables = {"What it came to": (SCORE_HEAD, score_rows(results))}
    return fault_report(tables, verdict(results), record, trouble(results))


def trouble(results: Sequence[TrainingResult]) -> int:
    """The number of things that no run may have; one more where they learn too little in the mean."""
    gap = mean_gap(results)
    return sum(each.losses for each in results) + (gap is None or not gap <= AIM_NATS)


def score_rows(results: Sequence[TrainingResult]) -> list[list[str]]:
    """The losses of each block's end; the last is that of the model."""
    return [
        [str(each.seed), name, f"{known:.4f}", f"{each.scores[name]:.4f}", f"{each.scores[name] - known:+.4f}"]
        for each in results
        for name, known in each.undisturbed.items()
        if name in each.scores
    ]


def verdict(results: Sequence[TrainingResult]) -> list[str]:
    """The outcome, a sentence a line."""
    gap, words = mean_gap(results), list[str]()
    for each in results:
        words += [
            f"seed {each.seed}: {each.rounds} rounds of {each.parts} parts in {each.seconds / 60:.1f} min under "
            f"{len(each.faults)} faults ({each.undisturbed_s / 60:.1f} min without): "
            + ("the run ended" if each.scores else "NO END"),
            f"{each.audit}; {each.heard} times a worker heard that its update was taken",
            *(f"wrong: {problem}" for problem in [*each.audit.problems, *each.lost][:SHOWN]),
            *each.remarks,
        ]
    if gap is None:
        return [*words, "no checkpoint to compare with the undisturbed run's"]
    held = "holds" if gap <= AIM_NATS else "does not hold"
    ends = f"over {len(results)} seeds {gap:+.4f} nats a byte in the mean at the end of the model"
    return [*words, f"{ends}, the aim of at most {AIM_NATS:g} {held}"]


def run_record(result: TrainingResult) -> dict[str, Any]:
    """One run, without its events; times are seconds since it began."""
    record = {name: value for name, value in vars(result).items() if name not in ("entries", "begin_s", "end_s")}
    found = {"audit": asdict(result.audit), "faults": list(map(result.times_of, result.faults))}
    return {**record, "seconds": result.seconds, **found}
