"""`onesweep bench rounds`: the same training over far links, in one place, and on paper."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.load.target import LOOPBACK
from loadtest.machine import Machine, commit, this_machine
from loadtest.rounds_bench.command import answer_of
from loadtest.rounds_bench.difference import Difference, paired
from loadtest.rounds_bench.run import NetworkRun, run_over_links
from loadtest.rounds_bench.settings import RoundsBench
from loadtest.rounds_bench.uplinks import plan_options, with_uplinks
from loadtest.table import aligned
from loadtest.wan.profile import profile_named
from stages.errors import OnesweepError

AS_SET = "as set"
PLAN_S = 600.0
LOOPBACK_LINK = ["--link", "lan"]
"""The nearest that there is to no link."""
EMULATED = (
    "Emulated: the links, by the lab; the machines, which are processes that share the cores of this one, so that a "
    "step takes as long as on a machine slower by that much. Real: processes, calls, TCP, training, files."
)


@dataclass(frozen=True)
class Compared:
    """A measured figure and what was planned for it."""

    name: str
    unit: str
    measured: float
    planned: float

    @property
    def off(self) -> float:
        """Measured over planned, less 1."""
        return self.measured / self.planned - 1


@dataclass(frozen=True)
class Figures:
    """Of all seeds."""

    runs: dict[int, NetworkRun]
    one_place: dict[int, float]
    """Validation loss in nats, by seed."""
    plan: dict[str, Any]
    """The row of `onesweep plan` for these settings, with the steps as long as they were."""
    machine: Machine
    commit: str

    @property
    def loss(self) -> Difference:
        """Of the run over the links, less that in one place."""
        return paired([run.next_byte for run in self.runs.values()], list(self.one_place.values()))

    def compared(self) -> list[Compared]:
        """Means over the seeds."""

        def mean(figure: Callable[[NetworkRun], float]) -> float:
            return statistics.mean(map(figure, self.runs.values()))

        plan = self.plan
        found = [
            Compared("bytes, coordinator", "MB", mean(lambda run: run.payload_bytes) / 1e6, plan["all_bytes"] / 1e6),
            Compared("a round", "s", mean(lambda run: run.round_s), plan["round_s"]),
            Compared("busy", "%", 100 * mean(lambda run: mean_busy(run)), 100 * plan["used"]),
            Compared("busy, least", "%", 100 * mean(lambda run: least_busy(run)), 100 * plan["used"]),
        ]
        if all(run.link_bytes is not None for run in self.runs.values()):
            carried = mean(lambda run: run.link_bytes or 0) / 1e6
            found.insert(1, Compared("bytes, links", "MB", carried, plan["all_wire_bytes"] / 1e6))
        return found


def mean_busy(run: NetworkRun) -> float:
    return statistics.mean(busy.share for busy in run.busy)


def least_busy(run: NetworkRun) -> float:
    return min(busy.share for busy in run.busy)


def measure_rounds(bench: RoundsBench, say: Callable[[str], None]) -> Figures:
    """Raises OnesweepError."""
    machine = this_machine()
    draft = _plan(bench, LOOPBACK_LINK, 1.0)
    parts, replicas = draft["parts"], draft["replicas"]
    workers = tuple(part for part in range(parts) for _ in range(replicas))
    link = LOOPBACK_LINK
    if bench.profile != LOOPBACK:
        profile = profile_named(bench.profile, bench.profiles)
        link = plan_options(with_uplinks(profile, len(workers), bench.up_mbps), len(workers))
    runs, one_place = dict[int, NetworkRun](), dict[int, float]()
    for seed in bench.seeds:
        run = runs[seed] = run_over_links(bench, seed, workers, draft[AS_SET]["steps_per_round"])
        say(f"seed {seed} over {bench.profile}: {run.next_byte:.4f} nats, {run.round_s:.1f} s a round")
        one_place[seed] = _in_one_place(bench, seed)
        say(f"seed {seed} in one place: {one_place[seed]:.4f} nats")
    step_s = statistics.mean(run.step_s for run in runs.values())
    return Figures(runs, one_place, _plan(bench, link, step_s)[AS_SET], machine, commit())


def rounds_table(figures: Figures) -> str:
    rows = [
        (f"{c.name} ({c.unit})", f"{c.measured:.4g}", f"{c.planned:.4g}", f"{100 * c.off:+.1f} %")
        for c in figures.compared()
    ]
    over, place = (
        statistics.mean(losses)
        for losses in ([run.next_byte for run in figures.runs.values()], list(figures.one_place.values()))
    )
    round_s = statistics.mean(run.round_s for run in figures.runs.values())
    rounds, steps = figures.plan["rounds"], figures.plan["steps_per_round"]
    step_s = statistics.mean(run.step_s for run in figures.runs.values())
    return "\n".join(
        [
            f"next byte, nats: {over:.4f} over the links, {place:.4f} in one place: {figures.loss}",
            f"{rounds} rounds of {steps} steps in {rounds * round_s:.0f} s; a step took {1000 * step_s:.0f} ms\n",
            aligned(("", "measured", "planned", "off by"), rows),
            f"\n{EMULATED}",
            f"{figures.machine.sentence}; commit {figures.commit}",
        ]
    )


def rounds_record(bench: RoundsBench, figures: Figures, command: str) -> dict[str, Any]:
    return {
        "bench": "rounds",
        "command": command,
        "commit": figures.commit,
        "machine": asdict(figures.machine),
        "emulated": EMULATED,
        "settings": {key: str(v) if isinstance(v, Path) else v for key, v in asdict(bench).items()},
        "next_byte_difference": asdict(figures.loss),
        "one_place": {str(seed): nats for seed, nats in figures.one_place.items()},
        "runs": {str(seed): run.to_record() for seed, run in figures.runs.items()},
        "plan": figures.plan,
        "compared": [{**asdict(c), "off": c.off} for c in figures.compared()],
    }


def _plan(bench: RoundsBench, link: list[str], step_s: float) -> dict[str, Any]:
    """The answer of `onesweep plan`, its rows by name."""
    answer = answer_of(["plan", "--config", str(bench.config), *link, "--step-s", f"{step_s:.9g}"], PLAN_S)
    return {**answer, **{row["name"]: row for row in answer["rows"]}}


def _in_one_place(bench: RoundsBench, seed: int) -> float:
    """The loss of one worker a part that reads what all replicas read."""
    data = [] if bench.data is None else ["--data", str(bench.data)]
    with tempfile.TemporaryDirectory(prefix="onesweep-bench-") as folder:
        command = ["train", "rounds", "--config", str(bench.config), *data, "--one-place", "only", "--seeds", str(seed)]
        command += ["--threads", "1"]  # as each worker has: on a busy machine two wait for each other
        results = answer_of([*command, "--out", folder], bench.within_s)["results"]
    if len(results) != 1:
        raise OnesweepError("one place needs settings with replicas above 1: with one, the rounds are in one place")
    loss: float = results[0]["losses"]["next_byte"]
    return loss
