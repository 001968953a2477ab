"""`bench chaos-training --faults none`: a training over far links, beside the same in one place and on paper."""

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.faults.base import Say, links_of
from loadtest.faults.process import answer_of
from loadtest.faults.settings import RunFile, TrainingChaosSettings
from loadtest.faults.training_observer import LogEntry, RunView
from loadtest.faults.training_testbed import TrainingSetup, TrainingTestbed, open_training_testbed
from loadtest.lab.profile import ROUTER, Link, Override, Profile, node_names
from loadtest.report.table import aligned
from loadtest.workload.testbed import LOOPBACK
from stages.errors import OnesweepError
from trainer.v1.rounds_pb2 import WorkerStatus

AS_SET = "as set"
WITHIN_S = 3600.0
LOOPBACK_LINK = ["--link", "lan"]  # the nearest that the planner has to no link
LEASE_S = 15.0  # a worker reports its figures three times a lease
NEVER = 1_000_000  # rounds between checkpoints: one is written when the run is over
HEAD = ("", "measured", "planned")


@dataclass(frozen=True)
class WorkerLoad:
    """One worker, between the first and the last time that it reported something new."""

    worker: str
    share: float  # of the time, spent in training steps
    step_s: float


@dataclass(frozen=True)
class NetworkRun:
    """The figures of one run over the links, and the loss of one place."""

    next_byte: float  # validation loss in nats, of the last block's head
    one_place: float
    round_s: float
    loads: list[WorkerLoad]
    payload_bytes: int  # as the coordinator counts: pieces of updates and of weights
    link_bytes: int | None  # as the lab's links count, with headers; None where they do not count


@dataclass(frozen=True)
class TrainingFigures:
    """The figures of all seeds, and the row of `onesweep train plan` for these settings."""

    runs: dict[int, NetworkRun]
    plan: dict[str, Any]

    def rows(self) -> list[tuple[str, float, float | None]]:
        """Name, mean over the seeds, and what was planned."""
        runs, plan = list(self.runs.values()), self.plan
        carried = [run.link_bytes for run in runs if run.link_bytes is not None]
        busy = [statistics.mean(load.share for load in run.loads) for run in runs]
        least = [min(load.share for load in run.loads) for run in runs]
        found: list[tuple[str, list[float], float | None]] = [
            ("next byte, nats", [run.next_byte for run in runs], None),
            ("less that of one place", [run.next_byte - run.one_place for run in runs], None),
            ("bytes, coordinator (MB)", [run.payload_bytes / 1e6 for run in runs], plan["all_bytes"] / 1e6),
            ("bytes, links (MB)", [size / 1e6 for size in carried], plan["all_wire_bytes"] / 1e6),
            ("a round (s)", [run.round_s for run in runs], plan["round_s"]),
            ("busy", busy, plan["used"]),
            ("busy, least", least, plan["used"]),
        ]
        return [(name, statistics.mean(values), planned) for name, values, planned in found if values]

    def table(self) -> str:
        cells = [(name, f"{mean:.4g}", "-" if plan is None else f"{plan:.4g}") for name, mean, plan in self.rows()]
        rounds, steps = self.plan["rounds"], self.plan["steps_per_round"]
        return f"{rounds} rounds of {steps} steps, {len(self.runs)} seeds\n\n{aligned(HEAD, cells)}"

    def record(self) -> dict[str, Any]:
        return {"runs": {str(seed): asdict(run) for seed, run in self.runs.items()}, "plan": self.plan}


def measure_training(settings: TrainingChaosSettings, say: Say) -> TrainingFigures:
    """:param settings: were checked. Raises OnesweepError."""
    runs, steps_s = dict[int, NetworkRun](), list[float]()
    with tempfile.TemporaryDirectory(prefix="onesweep-run-") as folder:
        config = Path(folder) / "run.toml"
        links = links_of(settings.profile, settings.profiles)
        for each in settings.runs():
            run, seed = each.run_file(), each.seeds[0]
            config.write_text(run.text, encoding="utf-8")
            if links is not None:
                links = with_uplinks(links, len(run.workers), settings.up_mbps)
            one_place = _in_one_place(config, each)
            say(f"seed {seed} in one place: {one_place:.4f} nats")
            runs[seed] = _over_links(config, settings, run, links, one_place)
            say(f"seed {seed} over {settings.profile}: {runs[seed].next_byte:.4f} nats")
            steps_s += [load.step_s for load in runs[seed].loads]
        link = LOOPBACK_LINK if links is None else plan_options(links, len(run.workers))
        return TrainingFigures(runs, _plan(config, link, statistics.mean(steps_s)))


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
    return ["--link", f"{rate(ups)},{rate(downs)},{delay:g}"]


def _plan(config: Path, link: list[str], step_s: float) -> dict[str, Any]:
    answer = answer_of(["train", "plan", "--config", str(config), *link, "--step-s", f"{step_s:.9g}"], WITHIN_S)
    return next(row for row in answer["rows"] if row["name"] == AS_SET)


def _in_one_place(config: Path, settings: TrainingChaosSettings) -> float:
    """The loss of one worker a part that reads the text of all replicas."""
    data = [] if settings.data is None else ["--data", str(settings.data)]
    # one thread, as each worker has: on a busy machine two wait for each other
    command = ["train", "simulate", "--config", str(config), *data, "--one-place", "only", "--threads", "1"]
    results = answer_of([*command, "--seeds", str(settings.seeds[0])], WITHIN_S)["results"]
    if len(results) != 1:
        raise OnesweepError("one place needs settings with replicas above 1: with one, the rounds are in one place")
    loss: float = results[0]["losses"]["next_byte"]
    return loss


def _over_links(
    config: Path, settings: TrainingChaosSettings, run: RunFile, links: Profile | None, one_place: float
) -> NetworkRun:
    """Raises OnesweepError."""
    setup = TrainingSetup(
        *(config, settings.data, run.workers, links or LOOPBACK),
        lease_s=LEASE_S,
        publish_every=NEVER,
        # at a pace: workers that share cores would measure each other, and who waits for a core looks busy
        worker_options=("--pace-s", str(settings.pace_s)),
    )
    views = list[RunView]()
    with open_training_testbed(setup, TrainingTestbed) as testbed:
        testbed.start()
        if not testbed.follow(views.append, WITHIN_S) or not testbed.wait_end(WITHIN_S):
            raise OnesweepError(f"the run has not ended after {WITHIN_S:.0f} s: {testbed.coordinator.last_words()}")
        loads, round_s = worker_loads(views, run.steps_per_round), round_seconds(testbed.log.entries)
        if not loads or round_s is None:
            raise OnesweepError("the run was over before it could be watched: give it more steps")
        counters = testbed.network.lab.counters() if testbed.network.lab is not None else {}
        metrics = json.loads((testbed.out / "manifest.json").read_text(encoding="utf-8"))["metrics"]
    carried = sum(counts["carried_bytes"] for counts in counters.values()) or None
    return NetworkRun(metrics["valid"]["next_byte"], one_place, round_s, loads, views[-1].moved_bytes, carried)


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
    return [load for name in names if (load := _load(name, _news(views, name), steps_per_round)) is not None]


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
