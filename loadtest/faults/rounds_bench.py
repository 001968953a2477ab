"""`onesweep bench rounds`: the same training over far links, in one place, and on paper."""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onesweep.loadtest.faults.base import Say, check_links, links_of
from onesweep.loadtest.faults.process import answer_of
from onesweep.loadtest.faults.settings import RoundsBenchSettings
from onesweep.loadtest.faults.training_observer import LogEntry, RunView
from onesweep.loadtest.faults.training_testbed import TrainingSetup, TrainingTestbed, open_training_testbed
from onesweep.loadtest.lab.profile import ROUTER, Link, Override, Profile, node_names
from onesweep.loadtest.report.record import MachineFacts, commit, this_machine
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.testbed import LOOPBACK
from onesweep.stages.errors import InputError, OnesweepError
from onesweep.stages.settings import read_toml
from onesweep.trainer.v1.rounds_pb2 import WorkerStatus

AS_SET = "as set"
PLAN_S = 600.0
LOOPBACK_LINK = ["--link", "lan"]  # the nearest that the planner has to no link
LEASE_S = 15.0  # a worker reports its figures three times a lease
PUBLISH_EVERY = 1_000_000  # rounds: a checkpoint is written once, when the run is over
# Quantiles 0.975 of Student's distribution with 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
MAX_SEEDS = len(STUDENT) + 1
EMULATED = (
    "Emulated: the links, by the lab; the machines, which are processes that share the cores of this one, so that a "
    "step takes as long as on a machine slower by that much. Real: processes, calls, TCP, training, files."
)


@dataclass(frozen=True)
class PairedDifference:
    """Mean of the first less the second, seed by seed, and half of its 95 % interval; None with one seed."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (f" ± {self.half:.4f}" if self.half is not None else " (one seed: no interval)")


@dataclass(frozen=True)
class WorkerLoad:
    """One worker, between the first and the last time that it reported something new."""

    worker: str
    share: float  # of the time, spent in training steps
    step_s: float


@dataclass(frozen=True)
class NetworkRun:
    """The figures of one run over the links."""

    next_byte: float  # validation loss in nats, of the last block's head
    round_s: float
    step_s: float  # of a local step, as it was on the machine that all workers share
    busy: list[WorkerLoad]
    payload_bytes: int  # as the coordinator counts: pieces of updates and of weights
    # As the lab's links count, both ways, with headers and acknowledgements; None where they do not count.
    link_bytes: int | None


@dataclass(frozen=True)
class PlannedFigure:
    """A measured figure and the one that was planned."""

    name: str
    unit: str
    measured: float
    planned: float

    @property
    def off(self) -> float:
        """Measured over planned, less 1."""
        return self.measured / self.planned - 1


@dataclass(frozen=True)
class RoundsFigures:
    """The figures of all seeds."""

    runs: dict[int, NetworkRun]
    one_place: dict[int, float]  # validation loss in nats, by seed
    plan: dict[str, Any]  # the row of `onesweep train plan` for these settings, with the steps as long as they were
    machine: MachineFacts
    commit: str

    @property
    def loss(self) -> PairedDifference:
        """The loss of the run over the links, less that in one place."""
        return paired([run.next_byte for run in self.runs.values()], list(self.one_place.values()))

    def mean(self, figure: Callable[[NetworkRun], float]) -> float:
        return statistics.mean(map(figure, self.runs.values()))

    def compared(self) -> list[PlannedFigure]:
        """Means over the seeds."""
        mean, plan = self.mean, self.plan
        busy = mean(lambda run: statistics.mean(worker.share for worker in run.busy))
        least = mean(lambda run: min(worker.share for worker in run.busy))
        found = [
            PlannedFigure("bytes, coordinator", "MB", mean(lambda r: r.payload_bytes) / 1e6, plan["all_bytes"] / 1e6),
            PlannedFigure("a round", "s", mean(lambda run: run.round_s), plan["round_s"]),
            PlannedFigure("busy", "%", 100 * busy, 100 * plan["used"]),
            PlannedFigure("busy, least", "%", 100 * least, 100 * plan["used"]),
        ]
        if all(run.link_bytes is not None for run in self.runs.values()):
            carried = mean(lambda run: run.link_bytes or 0) / 1e6
            found.insert(1, PlannedFigure("bytes, links", "MB", carried, plan["all_wire_bytes"] / 1e6))
        return found


def check_seeds(seeds: Sequence[int], config: Path) -> None:
    """Raises InputError."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise InputError(f"--seeds must be different whole numbers of at least 0, not {seeds}")
    if len(seeds) > MAX_SEEDS:
        raise InputError(f"--seeds takes at most {MAX_SEEDS}, not {len(seeds)}")
    if "seed" in read_toml(config):
        raise InputError(f"{config} has a seed; leave it out, --seeds says it")


def check_bench(settings: RoundsBenchSettings) -> None:
    """Raises OnesweepError."""
    check_seeds(settings.seeds, settings.config)
    check_links(settings.profile, settings.profiles, 1)


def measure_rounds(settings: RoundsBenchSettings, say: Say) -> RoundsFigures:
    """Raises OnesweepError."""
    machine = this_machine()
    draft = _plan(settings, LOOPBACK_LINK, 1.0)
    workers = tuple(part for part in range(draft["parts"]) for _ in range(draft["replicas"]))
    links = links_of(settings.profile, settings.profiles)
    if links is not None:
        links = with_uplinks(links, len(workers), settings.up_mbps)
    runs, one_place = dict[int, NetworkRun](), dict[int, float]()
    for seed in settings.seeds:
        run = runs[seed] = _run_over_links(settings, seed, workers, links, draft[AS_SET]["steps_per_round"])
        say(f"seed {seed} over {settings.profile}: {run.next_byte:.4f} nats, {run.round_s:.1f} s a round")
        one_place[seed] = _in_one_place(settings, seed)
        say(f"seed {seed} in one place: {one_place[seed]:.4f} nats")
    step_s = statistics.mean(run.step_s for run in runs.values())
    link = LOOPBACK_LINK if links is None else plan_options(links, len(workers))
    return RoundsFigures(runs, one_place, _plan(settings, link, step_s)[AS_SET], machine, commit())


def rounds_table(figures: RoundsFigures) -> str:
    rows = [
        (f"{c.name} ({c.unit})", f"{c.measured:.4g}", f"{c.planned:.4g}", f"{100 * c.off:+.1f} %")
        for c in figures.compared()
    ]
    over, place = figures.mean(lambda run: run.next_byte), statistics.mean(figures.one_place.values())
    round_s, step_s = figures.mean(lambda run: run.round_s), figures.mean(lambda run: run.step_s)
    rounds, steps = figures.plan["rounds"], figures.plan["steps_per_round"]
    return "\n".join(
        [
            f"next byte, nats: {over:.4f} over the links, {place:.4f} in one place: {figures.loss}",
            f"{rounds} rounds of {steps} steps in {rounds * round_s:.0f} s; a step took {1000 * step_s:.0f} ms\n",
            aligned(("", "measured", "planned", "off by"), rows),
            f"\n{EMULATED}",
            f"{figures.machine.processor}, {figures.machine.cores} cores; commit {figures.commit}",
        ]
    )


def rounds_record(settings: RoundsBenchSettings, figures: RoundsFigures, command: str) -> dict[str, Any]:
    return {
        "bench": "rounds",
        "command": command,
        "commit": figures.commit,
        "machine": asdict(figures.machine),
        "emulated": EMULATED,
        "settings": {key: str(v) if isinstance(v, Path) else v for key, v in asdict(settings).items()},
        "next_byte_difference": asdict(figures.loss),
        "one_place": {str(seed): nats for seed, nats in figures.one_place.items()},
        "runs": {str(seed): asdict(run) for seed, run in figures.runs.items()},
        "plan": figures.plan,
        "compared": [{**asdict(c), "off": c.off} for c in figures.compared()],
    }


def paired(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Student's interval for the mean of paired differences."""
    each = [a - b for a, b in zip(first, second, strict=True)]
    if len(each) < 2:
        return PairedDifference(each[0], None)
    half = STUDENT[len(each) - 2] * statistics.stdev(each) / math.sqrt(len(each))
    return PairedDifference(statistics.mean(each), half)


# Slow uplinks: workers far from their coordinator, and asymmetric as at home


def with_uplinks(profile: Profile, workers: int, up_mbps: float | None) -> Profile:
    """:param up_mbps: of every link from a worker to the coordinator; None: as it is."""
    if up_mbps is None:
        return profile
    nodes = node_names(workers)[1:]
    slow = [Override(node, ROUTER, replace(profile.link(node, ROUTER), rate_mbps=up_mbps)) for node in nodes]
    return replace(profile, name="uplinks", overrides=(*profile.overrides, *slow))


def plan_options(profile: Profile, workers: int) -> list[str]:
    """The options of `onesweep train plan` for these links: the slowest and the farthest of each kind."""

    def rate(links: list[Link]) -> str:
        return f"{min(link.rate_mbps or 1e5 for link in links):g}"

    nodes = node_names(workers)[1:]
    ups, downs = [profile.link(n, ROUTER) for n in nodes], [profile.link(ROUTER, n) for n in nodes]
    delay = max(link.delay_ms for link in (*ups, *downs))
    return ["--up-mbps", rate(ups), "--down-mbps", rate(downs), "--latency-ms", f"{delay:g}"]


# One run


def _plan(settings: RoundsBenchSettings, link: list[str], step_s: float) -> dict[str, Any]:
    """The answer of `onesweep train plan`, its rows by name."""
    answer = answer_of(["train", "plan", "--config", str(settings.config), *link, "--step-s", f"{step_s:.9g}"], PLAN_S)
    return {**answer, **{row["name"]: row for row in answer["rows"]}}


def _in_one_place(settings: RoundsBenchSettings, seed: int) -> float:
    """The loss of one worker a part that reads the text of all replicas."""
    data = [] if settings.data is None else ["--data", str(settings.data)]
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        command = ["train", "simulate", "--config", str(settings.config), *data, "--one-place", "only"]
        # one thread, as each worker has: on a busy machine two wait for each other
        command += ["--seeds", str(seed), "--threads", "1", "--out", folder]
        results = answer_of(command, settings.within_s)["results"]
    if len(results) != 1:
        raise OnesweepError("one place needs settings with replicas above 1: with one, the rounds are in one place")
    loss: float = results[0]["losses"]["next_byte"]
    return loss


def _run_over_links(
    settings: RoundsBenchSettings, seed: int, workers: tuple[int, ...], links: Profile | None, steps_per_round: int
) -> NetworkRun:
    """:param workers: the part of each. Raises OnesweepError."""
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        config = Path(folder) / f"seed-{seed}.toml"
        # a TOML file has it before its first section
        config.write_text(f"seed = {seed}\n" + settings.config.read_text(encoding="utf-8"), encoding="utf-8")
        setup = TrainingSetup(
            config,
            settings.data,
            workers,
            links or LOOPBACK,
            lease_s=LEASE_S,
            publish_every=PUBLISH_EVERY,
            # at a pace: six workers on two cores would measure each other, and who waits for a core looks busy
            worker_options=("--pace-s", str(settings.pace_s)),
        )
        with open_training_testbed(setup, TrainingTestbed) as testbed:
            return _figures(testbed, _follow(testbed, settings.within_s), steps_per_round)


def _follow(testbed: TrainingTestbed, within_s: float) -> list[RunView]:
    """Every view of the run, the last one of its end, when all its processes have ended."""
    seen: list[RunView] = []
    # the watcher finds a coordinator at the first try, and so before any worker is ready to train
    testbed.coordinator.start()

    def begun() -> bool:
        testbed.check()
        return bool(testbed.log.entries)

    testbed.wait_until(begun, within_s)
    testbed.start()
    if not testbed.follow(seen.append, within_s) or not testbed.wait_end(within_s):
        raise OnesweepError(f"the run has not ended after {within_s:.0f} s: {testbed.coordinator.last_words()}")
    return seen


def _figures(testbed: TrainingTestbed, views: list[RunView], steps_per_round: int) -> NetworkRun:
    loads, round_s = worker_loads(views, steps_per_round), round_seconds(testbed.log.entries)
    if not loads or round_s is None:
        raise OnesweepError("the run was over before it could be watched: give it more steps")
    lab = testbed.network.lab
    counters = lab.counters() if lab is not None else {}
    metrics = json.loads((testbed.out / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    return NetworkRun(
        next_byte=metrics["valid"]["next_byte"],
        round_s=round_s,
        step_s=statistics.mean(load.step_s for load in loads),
        busy=loads,
        payload_bytes=views[-1].moved_bytes,
        link_bytes=sum(counts["carried_bytes"] for counts in counters.values()) or None,
    )


def round_seconds(entries: Sequence[LogEntry]) -> float | None:
    """Mean time from one merge to the next, of the part that takes longest; None where none has two.

    The time before the first merge, with the start of processes, is left out.
    """
    times: dict[str, list[float]] = {}
    for entry in entries:
        if entry.kind == "closed":
            times.setdefault(entry.part, []).append(entry.at_s)
    return max(((at[-1] - at[0]) / (len(at) - 1) for at in times.values() if len(at) > 1), default=None)


def worker_loads(views: Sequence[RunView], steps_per_round: int) -> list[WorkerLoad]:
    """The load of every worker that reported something new twice, after its first round."""
    names = sorted({worker.worker for view in views for worker in view.update.workers})
    found = [_load(name, _news(views, name), steps_per_round) for name in names]
    return [load for load in found if load is not None]


def _news(views: Sequence[RunView], name: str) -> list[tuple[float, WorkerStatus]]:
    """Views in which a worker's own figures had changed: it reports them now and then only."""
    found: list[tuple[float, WorkerStatus]] = []
    for view in views:
        worker = view.worker(name)
        if worker is None or worker.round < 1:
            continue
        if not found or worker.busy_seconds > found[-1][1].busy_seconds:
            found.append((view.at_s, worker))
    return found[1:]  # the first may be old


def _load(name: str, news: list[tuple[float, WorkerStatus]], steps_per_round: int) -> WorkerLoad | None:
    if len(news) < 2:
        return None
    (begin_s, first), (end_s, last) = news[0], news[-1]
    steps = (last.round - first.round) * steps_per_round + last.steps - first.steps
    busy_s = last.busy_seconds - first.busy_seconds
    return WorkerLoad(name, busy_s / (end_s - begin_s), busy_s / steps) if steps > 0 else None
