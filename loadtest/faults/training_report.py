"""The report of a training under faults: sentences, tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loadtest.commands import BenchReport
from loadtest.faults.base import ReportTable, fault_report, seconds
from loadtest.faults.training_run import AIM_NATS, NEXT_BYTE, TrainingResult
from loadtest.report.table import percentile

SHOWN = 8
FAULT_HEAD = ("fault", "times", "its own next update p50 s", "max s")
SCORE_HEAD = ("nats a byte", "undisturbed", "with faults", "difference")


def training_report(result: TrainingResult) -> BenchReport:
    """The report of `bench chaos-training` under faults."""
    return fault_report(tables(result), verdict(result), training_record(result), trouble=result.trouble)


def tables(result: TrainingResult) -> list[ReportTable]:
    """The time that faults kept work away, and the losses."""
    waits = []
    for kind in dict.fromkeys(fault.kind for fault in result.faults):
        found = [fault.back_s for fault in result.faults if fault.kind == kind]
        known = sorted(wait_s for wait_s in found if wait_s is not None)
        waits.append([kind, str(len(found)), *(seconds(percentile(known, percent)) for percent in (50, 100))])
    scores = [
        [name, f"{known:.4f}", f"{result.scores[name]:.4f}", f"{result.scores[name] - known:+.4f}"]
        for name, known in result.reference.scores.items()
        if name in result.scores
    ]
    return [
        ReportTable("How long faults kept work away", FAULT_HEAD, waits),
        ReportTable("What it came to", SCORE_HEAD, scores),
    ]


def verdict(result: TrainingResult) -> list[str]:
    """The outcome, a sentence a line."""
    every = (result, *result.others)
    words = [
        f"{result.rounds} rounds of {result.run.parts} parts in {result.seconds / 60:.1f} min "
        f"under {len(result.faults)} faults ({result.reference.seconds / 60:.1f} min without): "
        + ("the run ended" if result.finished else "NO END"),
        *(
            f"seed {each.settings.seeds[0]}: {each.audit}; {each.heard} times a worker heard that its update was taken"
            for each in every
        ),
        _gap_words(result),
    ]
    words += [f"wrong: {problem}" for each in every for problem in each.lost[:SHOWN]]
    words += [ending for other in result.others for ending in other.endings]
    return [*words, *result.endings, *result.omissions]


def training_record(result: TrainingResult) -> dict[str, Any]:
    """Times are seconds since the run began."""
    begin_s, settings = result.begin_s, result.settings
    return {
        "profile": settings.profile,
        "seed": settings.seed,
        "gap_nats": result.gap_nats,
        "others": [{"scores_nats": o.scores, "undisturbed": o.reference.scores} for o in result.others],
        "run": result.run.text,
        "rounds": result.rounds,
        "lease_s": settings.lease_s,
        "seconds": result.seconds,
        "verdict": verdict(result),
        "faults": [
            {**asdict(fault), "begin_s": fault.begin_s - begin_s, "end_s": fault.end_s - begin_s}
            for fault in result.faults
        ],
        "scores_nats": result.scores,
        "undisturbed": {"seconds": result.reference.seconds, "scores_nats": result.reference.scores},
        "audit": result.audit,
        "lost": result.lost,
        "finished": result.finished,
        "ended": result.ended,
        "log": [{"at_s": entry.at_s - begin_s, **entry.record} for entry in result.entries],
    }


def _gap_words(result: TrainingResult) -> str:
    if result.gap_nats is None:
        return "no checkpoint to compare with the undisturbed run's"
    held = "holds" if result.gap_nats <= AIM_NATS else "does not hold"
    found, known = result.scores[NEXT_BYTE], result.reference.scores[NEXT_BYTE]
    return (
        f"{found:.4f} nats a byte at the end of the first seed, {known:.4f} undisturbed; over {1 + len(result.others)} "
        f"seeds {result.gap_nats:+.4f} in the mean, the aim of at most {AIM_NATS:g} {held}"
    )
