"""The report of a training under faults: sentences, tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from loadtest.commands import BenchReport
from loadtest.faults.base import fault_report, seconds
from loadtest.faults.training_run import AIM_NATS, TrainingResult, mean_gap, recovery_s
from loadtest.report.table import percentile

SHOWN = 8
FAULT_HEAD = ("fault", "times", "its own next update p50 s", "max s")
SCORE_HEAD = ("seed", "nats a byte", "undisturbed", "with faults", "difference")

Results = Sequence[TrainingResult]  # one for each seed


def training_report(results: Results) -> BenchReport:
    """The report of `bench chaos-training`."""
    record = {"verdict": verdict(results), "gap_nats": mean_gap(results), "runs": list(map(run_record, results))}
    waits, scores = (FAULT_HEAD, fault_rows(results)), (SCORE_HEAD, score_rows(results))
    tables = {"How long faults kept work away": waits, "What it came to": scores}
    return fault_report(tables, verdict(results), record, trouble(results))


def trouble(results: Results) -> int:
    """The number of things that no run may have; one more where they learn too little in the mean."""
    gap = mean_gap(results)
    return sum(each.losses for each in results) + (gap is None or not gap <= AIM_NATS)


def fault_rows(results: Results) -> list[list[str]]:
    """The time that faults kept work away."""
    waits = dict[str, list[float | None]]()
    for result in results:
        for fault in result.faults:
            waits.setdefault(fault.kind, []).append(recovery_s(fault, result.entries))
    rows = []
    for kind, found in waits.items():
        known = sorted(wait_s for wait_s in found if wait_s is not None)
        rows.append([kind, str(len(found)), *(seconds(percentile(known, percent)) for percent in (50, 100))])
    return rows


def score_rows(results: Results) -> list[list[str]]:
    """The losses of each block's end; the last is that of the model."""
    return [
        [str(each.seed), name, f"{known:.4f}", f"{each.scores[name]:.4f}", f"{each.scores[name] - known:+.4f}"]
        for each in results
        for name, known in each.undisturbed.items()
        if name in each.scores
    ]


def verdict(results: Results) -> list[str]:
    """The outcome, a sentence a line."""
    gap, words = mean_gap(results), list[str]()
    for each in results:
        words += [
            f"seed {each.seed}: {each.rounds} rounds of {each.parts} parts in {each.seconds / 60:.1f} min under "
            f"{len(each.faults)} faults ({each.undisturbed_s / 60:.1f} min without): "
            + ("the run ended" if each.scores else "NO END"),
            f"{each.audit}; {each.heard} times a worker heard that its update was taken",
            *(f"wrong: {problem}" for problem in each.lost[:SHOWN]),
            *each.endings,
            *each.omissions,
        ]
    if gap is None:
        return [*words, "no checkpoint to compare with the undisturbed run's"]
    held = "holds" if gap <= AIM_NATS else "does not hold"
    ends = f"over {len(results)} seeds {gap:+.4f} nats a byte in the mean at the end of the model"
    return [*words, f"{ends}, the aim of at most {AIM_NATS:g} {held}"]


def run_record(result: TrainingResult) -> dict[str, Any]:
    """One run, without its events; times are seconds since it began."""
    record = {name: value for name, value in vars(result).items() if name not in ("entries", "begin_s", "end_s")}
    faults = [
        {**asdict(fault), "begin_s": fault.begin_s - result.begin_s, "end_s": fault.end_s - result.begin_s}
        for fault in result.faults
    ]
    return {**record, "seconds": result.seconds, "faults": faults}
