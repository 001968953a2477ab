"""`bench chaos --simulate`: many schedules one after the other, what they found, and the fewest faults that find it."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from loadtest.commands import BenchReport
from loadtest.report.table import aligned
from loadtest.simulation.schedule import KINDS, Schedule, make_schedule
from loadtest.simulation.world import CASES, LATE_S, RequestOutcome, ScheduleRun, Weights, run_schedule

SAY_EVERY = 1000  # schedules
FATES, BAD_FATES = ("right", "left", "hurried"), ("lost", "wrong", "late")


@dataclass
class Found:
    """The count of what schedules did, and the first that fails."""

    first_seed: int
    schedules: int = 0
    requests: int = 0
    replays: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    failing: Schedule | None = None
    trouble: tuple[str, ...] = ()

    def add(self, schedule: Schedule, run: ScheduleRun, texts: Sequence[bytes]) -> None:
        self.schedules += 1
        self.requests += len(run.outcomes)
        self.replays += sum(each.replays for each in run.outcomes)
        self.virtual_s += run.seconds
        self.faults.update(fault.kind for fault in schedule.faults)
        self.fates.update(fate_of(each, texts[each.case]) for each in run.outcomes)


def fate_of(outcome: RequestOutcome, text: bytes) -> str:
    """right, or what no request may be (wrong, late, lost), or what a client asked for (left, hurried)."""
    if outcome.text != text if outcome.status == "OK" else not text.startswith(outcome.text):
        return "wrong"
    if outcome.took_s > outcome.patience_s + LATE_S:
        return "late"
    hurried = outcome.status == "DEADLINE_EXCEEDED" and outcome.took_s >= outcome.patience_s - LATE_S
    return {"OK": "right", "LEFT": "left"}.get(outcome.status, "hurried" if hurried else "lost")


def trouble_of(run: ScheduleRun, texts: Sequence[bytes]) -> tuple[str, ...]:
    """A sentence for whatever no schedule may lead to."""
    told = list(run.problems)
    for each in run.outcomes:
        if (fate := fate_of(each, texts[each.case])) in BAD_FATES:
            case = CASES[each.case]
            told.append(
                f"{fate}: {case.mode}, seed {case.seed}, {each.status} after {each.took_s:.2f} s, {each.text!r} of "
                f"{texts[each.case]!r}: {each.said}"
            )
    return tuple(told)


def fewest(weights: Weights, schedule: Schedule) -> Schedule:
    """The same schedule without the faults that its trouble does not need."""
    index = 0
    while index < len(schedule.faults):
        less = replace(schedule, faults=schedule.faults[:index] + schedule.faults[index + 1 :])
        if trouble_of(run_schedule(weights, less), weights.texts):
            schedule = less
        else:
            index += 1
    return schedule


def search(schedules: int, first_seed: int, say: Callable[[str], None]) -> BenchReport:
    """Run the schedules of a seed and of those after it, until one fails; that one is shrunk."""
    found = Found(first_seed)
    with tempfile.TemporaryDirectory(prefix="onesweep-simulation-") as folder:
        weights = Weights(Path(folder))
        texts, begin_s = weights.texts, time.process_time()
        for seed in range(first_seed, first_seed + schedules):
            schedule = make_schedule(seed, len(CASES))
            run = run_schedule(weights, schedule)
            found.add(schedule, run, texts)
            if found.schedules % SAY_EVERY == 0:
                say(f"  {found.schedules} schedules in {time.process_time() - begin_s:.0f} s of one processor")
            if trouble_of(run, texts):
                say(f"seed {seed} fails: looking for the fewest faults that do ...")
                found.failing = fewest(weights, schedule)
                found.trouble = trouble_of(run_schedule(weights, found.failing), texts)
                break
        return report(found, time.process_time() - begin_s)


def report(found: Found, seconds: float) -> BenchReport:
    """:param seconds: of one processor."""
    minute = 60 * found.schedules / max(seconds, 1e-3)
    fates = ", ".join(f"{found.fates[fate]} {fate}" for fate in (*FATES, *BAD_FATES))
    lines = [
        f"{found.schedules} schedules, {minute:.0f} a minute of one processor, {found.virtual_s:.0f} s of virtual time",
        f"{found.requests} requests: {fates}; {found.replays} replays",
    ]
    if found.failing is not None:
        lines += [f"seed {found.failing.seed} fails, with the faults that it needs:"]
        lines += [*(f"  {fault}" for fault in found.failing.faults), *found.trouble]
        lines += [f"again: onesweep bench chaos --simulate --schedules 1 --seed {found.failing.seed}"]
    rows = [(kind, str(found.faults[kind])) for kind in KINDS]
    table = f"{aligned(('fault', 'times'), rows)}\n\n" + "\n".join(f"- {line}" for line in lines)
    record = {**vars(found), "schedules_a_minute": minute, "failing": found.failing and asdict(found.failing)}
    return BenchReport(table, record, holds=found.failing is None)
