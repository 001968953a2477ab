"""`bench chaos --simulate`: runs many schedules, reports failures, and shrinks one to the fewest faults."""

import asyncio
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

import torch

from loadtest.commands import BenchReport, echo
from loadtest.simulation.calls import MemoryChannel
from loadtest.simulation.loop import captured_log, virtual_time
from loadtest.simulation.processes import TinyRelease
from loadtest.simulation.schedule import (
    AGAIN_S,
    CLIENT_NAMES,
    FLAP_S,
    HOSTS,
    KINDS,
    REPLICAS,
    ROUTER_NAMES,
    SILENT_KINDS,
    STAGES,
    Asked,
    PlannedFault,
    Schedule,
    make_schedule,
)
from loadtest.simulation.training import Training, TrainingWorld, train
from loadtest.simulation.world import CASES, DRAWINGS, RequestOutcome, ScheduleRun, World
from serving.cli.deploy import SWITCHED
from serving.router.paths import HEDGES
from serving.router.topology import HostEntry, Topology
from stages.progress import aligned, counted
from stages.wire import channel

DISKS = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a tenth of the time on a real disk
AFTER = Asked(0, 0.0), Asked(8, 0.0)  # sent to each router once all faults are over
Answers = Sequence[Sequence[RequestOutcome]]  # per case, per release
ECHO_EVERY = 1000  # schedules
FATES = "right", "left", "hurried", "refused", "between releases"
BAD_FATES = "lost", "wrong", "late", "slow", "moved"
LATE_S = 0.5
BUSY_S = 0.3  # time of the other client's requests
MAX_MOVES = 2  # caused by one fault, including moves to hosts that it has hit
# Two faults may leave a router without a path, or hit two tries at once: then a hop's timeout passes.
NO_WAY_S, BACK_S = 6.0, 2.5  # BACK_S: after a fault routers dial again, and gRPC waits up to 2 s in between


class SimulatedModel(Protocol):
    """The code under test, with a model for it."""

    @property
    def answers(self) -> Answers: ...

    def schedule(self, seed: int) -> Schedule: ...

    def run(self, schedule: Schedule) -> ScheduleRun: ...


class Weights:
    """Two releases with the outcome of every case, and a training run."""

    def __init__(self, directory: Path) -> None:
        """:param directory: for their files."""
        torch.set_num_threads(1)
        self.releases = [TinyRelease.made(directory / name, seed) for seed, name in enumerate(("before", "after"))]
        self.drawing, self.training = TinyRelease.drawing(directory / "draws"), Training.made(directory / "training")
        self.topology = Topology(
            tuple(
                HostEntry(name, f"10.0.0.{i + 1}:7701", (i // REPLICAS,), f"10.0.0.{i + 1}:7701")
                for i, name in enumerate(HOSTS)
            )
        )

    def schedule(self, seed: int) -> Schedule:
        return make_schedule(seed, len(CASES))

    def run(self, schedule: Schedule, is_second: bool = False) -> ScheduleRun:
        """Run a schedule from its start to its end, in virtual time. Deterministic.

        :param is_second: serve the second release instead of the first."""
        with ExitStack() as stack:
            gc.disable()  # saves a tenth of the time; and a collection in between would make runs of one seed differ
            stack.callback(gc.enable)
            connect = stack.enter_context(patch.object(channel, "connect"))  # also for the cleanup at the end
            logged, loop = stack.enter_context(captured_log()), stack.enter_context(virtual_time())
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onesweep-disks-", dir=DISKS)))
            world: World | TrainingWorld
            if schedule.trains:
                world = TrainingWorld(loop, self.training, directory)
                job = train(world, schedule)
            else:
                releases = [self.drawing] if schedule.draws else self.releases[is_second:]
                world = World(loop, self.topology, releases, schedule, directory)
                job = _run(world, schedule)
            connect.side_effect = partial(MemoryChannel, world.network)
            stack.callback(world.close)
            stack.enter_context(patch.object(os, "fsync", world.sync))
            stack.enter_context(patch.object(time, "time", world.unix_s))
            try:
                run = loop.run_until_complete(job)
                return replace(run, problems=[*loop.problems, *logged, *run.problems])
            except (RuntimeError, TimeoutError) as error:
                return ScheduleRun([], [], None, [f"the run did not end: {error!r}"], world.network.events)

    @cached_property
    def answers(self) -> list[tuple[RequestOutcome, ...]]:
        """The outcome of each case with each release, without faults, one request after the other."""
        requests = (tuple(Asked(case, 0.0) for case in range(len(CASES))),)
        plain, found = Schedule(-1, requests, (ROUTER_NAMES[:1],), ()), []
        draws = replace(plain, requests=(requests[0][: len(DRAWINGS)],), draws=True)
        for schedule, is_second in ((plain, False), (plain, True), (draws, False)):
            run = self.run(schedule, is_second)
            assert all(each.status == "OK" and not each.replays for each in run.outcomes), run
            found.append(run.outcomes)
        return [*zip(*found[:2], strict=True), *zip(found[2])]


@dataclass
class SearchResult:
    """Counts over schedules, and the first one that fails."""

    first_seed: int
    schedules: int = 0
    requests: int = 0
    replays: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    trainings: int = 0
    drawings: int = 0
    deploys: Counter[str] = field(default_factory=Counter)
    failing: Schedule | None = None
    trouble: tuple[str, ...] = ()

    def add(self, schedule: Schedule, run: ScheduleRun, answers: Answers) -> None:
        self.schedules += 1
        self.requests += len(run.outcomes)
        self.replays += sum(each.replays for each in run.outcomes)
        self.faults.update(fault.kind for fault in schedule.faults)
        self.trainings += schedule.trains
        self.drawings += len(run.outcomes) * schedule.draws
        self.deploys[{None: "none", "": "done"}.get(run.deploy, "given up")] += 1
        releases = 1 if schedule.deploy_at_s is None else None
        self.fates.update(fate_of(each, answers[each.case][:releases], schedule) for each in run.outcomes)


def fate_of(outcome: RequestOutcome, answers: Sequence[RequestOutcome], schedule: Schedule) -> str:
    """right; a failure (wrong, late, lost; slow or moved beyond what faults explain); the client's own doing (left,
    hurried); refused, because of full hosts, a broken one without an alternative, or both routers; or between releases:
    its router is lost and the others have switched, so its client has to ask again.

    :param answers: the same request's answers without faults, from each release that may have served it."""
    took_s, is_whole = outcome.took_s, outcome.status == "OK"
    begun = [each for each in answers if each.text.startswith(outcome.text)]
    lies = [fault for fault in schedule.faults if fault.kind == "lie"]
    if "bytes per day" in outcome.message or (outcome.status == "DATA_LOSS" and lies):
        return "refused"  # the client knows that the text is wrong
    if not begun or (is_whole and outcome.text != begun[0].text) or not outcome.previews <= begun[0].previews:
        return "wrong"
    answer = begun[0]
    if is_whole and not (outcome.extra >= answer.extra if lies else outcome.extra == answer.extra):  # liars may add
        return "wrong"
    if took_s > outcome.patience_s + LATE_S:
        return "late"
    if outcome.status == "ABORTED" and len(answers) > 1:
        return "between releases"
    met = faults_of(outcome, schedule)
    hit = [fault.stages for fault in schedule.faults if fault not in met and fault.at_s < outcome.begun_s + took_s]
    has_no_way = len(met) > 1 or any(fault.stages & stages for fault in met for stages in hit)
    refusing = {"RESOURCE_EXHAUSTED": "full", "INTERNAL": "broken" if has_no_way else ""}.get(outcome.status)
    routers = {name for fault in met for name in fault.targets if name in ROUTER_NAMES}
    if any(fault.kind == refusing for fault in met) or (outcome.status == "UNAVAILABLE" and len(routers) > 1):
        return "refused"
    if not is_whole:
        hurried = outcome.status in ("DEADLINE_EXCEEDED", "UNAVAILABLE") and took_s >= outcome.patience_s - LATE_S
        return "left" if outcome.status == "LEFT" else "hurried" if hurried else "lost"
    # a router searches for a path until a hop's timeout, and its client tries the other one
    has_searched = any(outcome.idle.intersection(fault.targets) for fault in schedule.faults)
    flaps = sum(int(fault.length_s / FLAP_S) for fault in met if fault.kind == "flap")
    if outcome.replays > MAX_MOVES * (len(met) + sum(fault.kind == "broken" for fault in met)) + flaps + has_searched:
        return "moved"
    recent = [fault for fault in schedule.faults if fault.at_s < outcome.begun_s + took_s]
    gone = {name for fault in recent if outcome.begun_s < fault.end_s + BACK_S for name in fault.targets}
    has_no_way |= any({f"{stage}-{i + 1}" for i in range(REPLICAS)} <= gone for stage in STAGES)
    delay_s = sum(met.values()) + (NO_WAY_S if has_no_way or (has_searched and outcome.replays) else 0.0)
    redone = [fault for fault in met if schedule.draws or not fault.stages]  # pictures, and another router, start over
    delay_s += answer.took_s * len(redone)
    drafts = outcome.mode == "ar-speculative"  # while it pays, judged by earlier drafts
    delay_s += KINDS["lie"].delay_s * len(lies)  # audits
    usual_s = answer.took_s * (1 + (drafts and any(fault.kind in ("slow", *SILENT_KINDS) for fault in schedule.faults)))
    return "slow" if took_s > usual_s + BUSY_S + delay_s else "right"


def faults_of(outcome: RequestOutcome, schedule: Schedule) -> dict[PlannedFault, float]:
    """The faults that a request may have met on its machines, and the seconds that each may have cost."""
    end_s = outcome.begun_s + outcome.took_s
    possible = (fault for fault in schedule.faults if outcome.places.issuperset(fault.targets))
    is_spent = schedule.second_tries < HEDGES
    delays_s = {fault: fault.delay_s(outcome.begun_s, end_s, schedule.faults, is_spent) for fault in possible}
    return {fault: delay_s for fault, delay_s in delays_s.items() if delay_s}


def trouble_of(schedule: Schedule, run: ScheduleRun, answers: Answers) -> tuple[str, ...]:
    """A sentence for everything that no schedule may cause."""
    found, is_deployed = list(run.problems), schedule.deploy_at_s is not None
    without_faults = replace(schedule, faults=())
    judged = [(each, answers[each.case][: 1 + is_deployed], schedule, "") for each in run.outcomes]
    judged += [(each, answers[each.case][is_deployed:][:1], without_faults, " after recovery") for each in run.after]
    for each, texts, meanwhile, when in judged:
        if (fate := fate_of(each, texts, meanwhile)) in BAD_FATES:
            took_s = max(answer.took_s for answer in texts)
            met, right = ", ".join(map(str, faults_of(each, meanwhile))) or "nothing", [a.text for a in texts]
            found.append(
                f"{fate}{when}: {each.mode}, case {each.case}, {each.status} after {each.took_s:.2f} s ({took_s:.2f} "
                f"without faults), moved {each.replays} times, met {met}, {each.text!r} of {right}: {each.message}"
            )
    return tuple(found)


async def _run(world: World, schedule: Schedule) -> ScheduleRun:
    for name in (*HOSTS, *ROUTER_NAMES):
        world.start(name)
    await world.wait_until_ready()
    begin_s = world.begin_s = world.loop.now_s
    for fault in schedule.faults:
        world.loop.call_at(begin_s + fault.at_s, world.begin, fault)
    clients = zip(CLIENT_NAMES, schedule.routers, schedule.requests, strict=False)
    deployed, states = asyncio.ensure_future(world.deploy(schedule.deploy_at_s)), world.release_states()
    found = await asyncio.gather(*(world.client(*each) for each in clients))
    failure = await deployed
    world.end_all()
    left = await world.wait_until_idle()
    await asyncio.sleep(AGAIN_S)
    await world.wait_until_ready()
    if failure and SWITCHED not in failure:
        left += world.changed_by_failure(states)
    if failure is not None and (again := await world.deploy(0.0)):
        left.append(f"it cannot be deployed after recovery: {again}; before: {failure}")
    world.network.states |= {("day", name) for name in ROUTER_NAMES}  # a new day, with a new quota of bytes
    after = [await world.client(f"after-{at}", [at], [case]) for at, case in zip(ROUTER_NAMES, AFTER, strict=True)]
    outcomes, later = ([each for of_client in some for each in of_client] for some in (found, after))
    return ScheduleRun(outcomes, later, failure, left, world.network.events)


def shrink(model: SimulatedModel, schedule: Schedule) -> Schedule:
    """The same schedule without the faults that are not needed for its trouble."""
    for fault in schedule.faults:
        smaller = replace(schedule, faults=tuple(each for each in schedule.faults if each is not fault))
        if trouble_of(smaller, model.run(smaller), model.answers):
            schedule = smaller
    return schedule


def search(
    schedules: int,
    first_seed: int,
    model: SimulatedModel | None = None,
    command: str = "onesweep bench chaos --simulate",
) -> BenchReport:
    """Run the schedules of a seed and the following ones until one fails, and shrink that one.

    :param model: the real code with a tiny model, unless a replacement is given.
    :param command: the command that reproduces a failure."""
    found = SearchResult(first_seed)
    with tempfile.TemporaryDirectory(prefix="onesweep-simulation-") as folder, captured_log():
        model = model or Weights(Path(folder))
        gc.freeze()  # lasting objects need no check after each schedule
        answers, begin_s = model.answers, time.process_time()
        for seed in range(first_seed, first_seed + schedules):
            run = model.run(schedule := model.schedule(seed))
            found.add(schedule, run, answers)
            if found.schedules % ECHO_EVERY == 0:
                echo(f"  {found.schedules} schedules in {time.process_time() - begin_s:.0f} s of CPU time")
            if trouble_of(schedule, run, answers):
                echo(f"seed {seed} fails: removing faults that it does not need ...")
                failing = found.failing = shrink(model, schedule)
                found.trouble = trouble_of(failing, model.run(failing), answers)
                break
        return report(found, time.process_time() - begin_s, command)


def report(found: SearchResult, seconds: float, command: str) -> BenchReport:
    """:param seconds: of processor time."""
    minute = 60 * found.schedules / max(seconds, 1e-3)
    fates = ", ".join(f"{found.fates[fate]} {fate}" for fate in (*FATES, *BAD_FATES))
    lines = [
        f"{found.schedules} schedules, {minute:.0f} per CPU minute",
        f"{found.requests} requests: {fates}; {found.replays} replays",
        f"{counted(found.deploys['done'], 'deployment')}, {found.deploys['given up']} given up; "
        f"{counted(found.trainings, 'training')}; {counted(found.drawings, 'request')} for pictures",
    ]
    if found.failing is not None:
        lines += [f"seed {found.failing.seed} fails with these faults:"]
        lines += [*(f"  {fault}" for fault in found.failing.faults), *found.trouble]
        lines += [f"reproduce: {command} --schedules 1 --seed {found.failing.seed}"]
    rows = [(kind, str(found.faults[kind])) for kind in KINDS]
    table = "\n".join([*aligned([("fault", "times"), *rows], ruled=True), "", *(f"- {line}" for line in lines)])
    record = {**vars(found), "schedules_a_minute": minute, "failing": found.failing and asdict(found.failing)}
    return BenchReport(table, record, passed=found.failing is None)
