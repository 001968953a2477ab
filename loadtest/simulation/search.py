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
from loadtest.simulation.schedule import KINDS, PlannedFault, Schedule, make_schedule
from loadtest.simulation.world import CASES, RequestOutcome, ScheduleRun, Weights, run_schedule

Answers = Sequence[Sequence[RequestOutcome]]  # of each case, by each release
SAY_EVERY = 1000  # schedules
FATES, BAD_FATES = ("right", "left", "hurried", "between releases"), ("lost", "wrong", "late", "slow", "moved")
LATE_S = 0.5
# What requests of the other client take, and the share of passes that is made ahead and thrown away.
BUSY_S, AHEAD, MORE_PASSES = 0.1, 0.1, 4
MOST_MOVES = 2  # by one fault: to hosts that it has hit, too
# Two faults may leave a router without a way, or hit two tries at once: a hop's time-out passes then.
NO_WAY_S = 6.0


@dataclass
class Found:
    """The count of what schedules did, and the first that fails."""

    first_seed: int
    schedules: int = 0
    requests: int = 0
    replays: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    trainings: int = 0
    deploys: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    failing: Schedule | None = None
    trouble: tuple[str, ...] = ()

    def add(self, schedule: Schedule, run: ScheduleRun, answers: Answers) -> None:
        self.schedules += 1
        self.requests += len(run.outcomes)
        self.replays += sum(each.replays for each in run.outcomes)
        self.virtual_s += run.seconds
        self.faults.update(fault.kind for fault in schedule.faults)
        self.trainings += schedule.trains
        self.deploys[{None: "none", "": "done"}.get(run.deploy, "given up")] += 1
        releases = None if deploys(schedule) else 1
        self.fates.update(fate_of(each, answers[each.case][:releases], schedule.faults) for each in run.outcomes)


def fate_of(outcome: RequestOutcome, answers: Sequence[RequestOutcome], faults: Sequence[PlannedFault]) -> str:
    """right; what no request may be (wrong, late, lost; slow or moved beyond what faults explain); what its
    client asked for (left, hurried); or between releases: the router that began it is lost and the others have
    switched, so its client has to ask again.

    :param answers: the same request's without faults, of each release that it may have got."""
    took_s, is_whole = outcome.took_s, outcome.status == "OK"
    begun = [each for each in answers if each.text.startswith(outcome.text)]
    if not begun or (is_whole and outcome.text != begun[0].text):
        return "wrong"
    answer = begun[0]
    if took_s > outcome.patience_s + LATE_S:
        return "late"
    if outcome.status == "ABORTED" and len(answers) > 1:
        return "between releases"
    if not is_whole:
        hurried = outcome.status == "DEADLINE_EXCEEDED" and took_s >= outcome.patience_s - LATE_S
        return "left" if outcome.status == "LEFT" else "hurried" if hurried else "lost"
    met = faults_of(outcome, faults)
    if outcome.replays > MOST_MOVES * len(met):
        return "moved"
    delay_s = sum(met.values()) + (NO_WAY_S if len(met) > 1 else 0.0)
    return "slow" if took_s > answer.took_s + BUSY_S + delay_s else "right"


def deploys(schedule: Schedule) -> bool:
    return schedule.deploy_at_s is not None


def faults_of(outcome: RequestOutcome, faults: Sequence[PlannedFault]) -> dict[PlannedFault, float]:
    """The faults that a request may have met, and the seconds that each may have cost it."""
    delays_s = {fault: fault.delay_s(outcome.begun_s, outcome.begun_s + outcome.took_s) for fault in faults}
    return {fault: delay_s for fault, delay_s in delays_s.items() if delay_s}


def trouble_of(schedule: Schedule, run: ScheduleRun, answers: Answers) -> tuple[str, ...]:
    """A sentence for whatever no schedule may lead to."""
    told, is_deployed = list(run.problems), deploys(schedule)
    judged = [(each, answers[each.case][: 1 + is_deployed], schedule.faults, "") for each in run.outcomes]
    judged += [(each, answers[each.case][is_deployed:][:1], (), " once all was well") for each in run.after]
    for each, texts, faults, when in judged:
        if (fate := fate_of(each, texts, faults)) in BAD_FATES:
            case, took_s = CASES[each.case], max(answer.took_s for answer in texts)
            told.append(
                f"{fate}{when}: {case.mode}, seed {case.seed}, {each.status} after {each.took_s:.2f} s ({took_s:.2f} "
                f"without faults), moved {each.replays} times, {each.text!r} of {[a.text for a in texts]}: {each.said}"
            )
    due = 0
    for each in run.outcomes:  # a client asks again where its connection to a router ended: that is no move of work
        again = sum(not fault.hits_host for fault in faults_of(each, schedule.faults))
        due += answers[each.case][0].passes * (1 + each.replays + again)
    if not is_deployed and run.passes > due * (1 + AHEAD) + MORE_PASSES:
        told.append(f"hosts made {run.passes} passes for requests that take {due}")
    return tuple(told)


def fewest(weights: Weights, schedule: Schedule) -> Schedule:
    """The same schedule without the faults that its trouble does not need."""
    index = 0
    while index < len(schedule.faults):
        less = replace(schedule, faults=schedule.faults[:index] + schedule.faults[index + 1 :])
        if trouble_of(less, run_schedule(weights, less), weights.answers):
            schedule = less
        else:
            index += 1
    return schedule


def search(schedules: int, first_seed: int, say: Callable[[str], None]) -> BenchReport:
    """Run the schedules of a seed and of those after it, until one fails; that one is shrunk."""
    found = Found(first_seed)
    with tempfile.TemporaryDirectory(prefix="onesweep-simulation-") as folder:
        weights = Weights(Path(folder))
        answers, begin_s = weights.answers, time.process_time()
        for seed in range(first_seed, first_seed + schedules):
            schedule = make_schedule(seed, len(CASES))
            run = run_schedule(weights, schedule)
            found.add(schedule, run, answers)
            if found.schedules % SAY_EVERY == 0:
                say(f"  {found.schedules} schedules in {time.process_time() - begin_s:.0f} s of one processor")
            if trouble_of(schedule, run, answers):
                say(f"seed {seed} fails: looking for the fewest faults that do ...")
                failing = found.failing = fewest(weights, schedule)
                found.trouble = trouble_of(failing, run_schedule(weights, failing), answers)
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
    lines.insert(
        2, f"{found.deploys['done']} deployments, {found.deploys['given up']} given up; {found.trainings} trainings"
    )
    rows = [(kind, str(found.faults[kind])) for kind in KINDS]
    table = f"{aligned(('fault', 'times'), rows)}\n\n" + "\n".join(f"- {line}" for line in lines)
    record = {**vars(found), "schedules_a_minute": minute, "failing": found.failing and asdict(found.failing)}
    return BenchReport(table, record, holds=found.failing is None)
