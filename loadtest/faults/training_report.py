"""The report of a training under faults: sentences, tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from loadtest.commands import BenchReport
from loadtest.faults.report import ReportTable, fault_report, seconds
from loadtest.faults.training_run import AIM_NATS, TrainingFaultRecord, TrainingResult, final_nats
from loadtest.report.table import percentile

SHOWN = 8
FAULT_HEAD = (
    *("fault", "times", "next update p50 s", "max s", "next merge p50 s", "max s"),
    *("its own next update p50 s", "max s"),
)
WAITS = ("accepted_s", "merged_s", "back_s")
LIE_HEAD = ("lie", "handed in", "accepted", "refused")
SCORE_HEAD = ("nats a byte", "undisturbed", "with faults", "difference")


def training_report(result: TrainingResult) -> BenchReport:
    """The report of `bench chaos-training` under faults."""
    return fault_report(tables(result), verdict(result), training_record(result), trouble=result.trouble)


def tables(result: TrainingResult) -> list[ReportTable]:
    """Sabotage, how long faults kept work away, and the losses."""
    kinds: dict[str, list[TrainingFaultRecord]] = {}
    for fault in result.faults:
        kinds.setdefault(fault.kind, []).append(fault)
    waits = [
        [kind, str(len(found)), *(cell for name in WAITS for cell in _waits(found, name))]
        for kind, found in kinds.items()
    ]
    lies = [
        [lie, str(found.total()), *(str(found[outcome]) for outcome in ("accepted", "refused"))]
        for lie, found in outcomes_by_lie(result.verdicts).items()
    ]
    # a row for the end of each block; the last one is that of the model
    scores = [
        [name, f"{known:.4f}", f"{result.scores[name]:.4f}", f"{result.scores[name] - known:+.4f}"]
        for name, known in result.reference.scores.items()
        if name in result.scores
    ]
    return [
        ReportTable("Sabotage", LIE_HEAD, lies),
        ReportTable("How long faults kept work away", FAULT_HEAD, waits),
        ReportTable("What it came to", SCORE_HEAD, scores),
    ]


def _waits(faults: Sequence[TrainingFaultRecord], name: str) -> list[str]:
    """Median and longest of one of WAITS."""
    known = sorted(wait for fault in faults if (wait := getattr(fault, name)) is not None)
    return [seconds(percentile(known, percent)) for percent in (50, 100)]


def outcomes_by_lie(verdicts: Iterable[dict[str, Any]]) -> dict[str, Counter[str]]:
    """The outcomes of byzantine workers' updates."""
    found: dict[str, Counter[str]] = {}
    for each in verdicts:
        found.setdefault(each["lie"], Counter())[each["outcome"]] += 1
    return found


def verdict(result: TrainingResult) -> list[str]:
    """The outcome, a sentence a line."""
    words = [
        f"{result.rounds} rounds of {result.run.parts} parts in {result.seconds / 60:.1f} min "
        f"under {len(result.faults)} faults ({result.reference.seconds / 60:.1f} min without): "
        + ("the run ended" if result.finished else "NO END"),
        *(
            f"seed {each.settings.seeds[0]}: {each.audit}; {each.heard} times a worker heard that its update was taken"
            for each in (result, *result.others)
        ),
        _gap_words(result),
    ]
    words += [f"wrong: {problem}" for each in (result, *result.others) for problem in each.lost[:SHOWN]]
    words += [ending for other in result.others for ending in other.endings]
    words += [*result.endings, *result.omissions]
    words += [f"of honest workers {n} x not taken: {why}" for why, n in result.refused.most_common(SHOWN)]
    reasons = {v["reason"] for v in result.verdicts if v["outcome"] == "refused"}
    return words + [f"to a saboteur: {reason}" for reason in sorted(reasons)[:SHOWN]]


def training_record(result: TrainingResult) -> dict[str, Any]:
    """Times are seconds since the run began."""
    begin_s, settings = result.begin_s, result.settings
    return {
        "profile": settings.profile,
        "seed": settings.seed,
        "gap_nats": None if result.gap is None else asdict(result.gap),
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
        "sabotage": result.verdicts,
        "honest_refusals": dict(result.refused),
        "log": [{"at_s": entry.at_s - begin_s, **entry.record} for entry in result.entries],
    }


def _gap_words(result: TrainingResult) -> str:
    if result.gap is None:
        return "no checkpoint to compare with the undisturbed run's"
    held = "holds" if result.gap.mean <= AIM_NATS else "does not hold"
    found, known = final_nats(result.scores), final_nats(result.reference.scores)
    return (
        f"{found:.4f} nats a byte at the end of the first seed, {known:.4f} undisturbed; over {1 + len(result.others)} "
        f"seeds {result.gap}, the aim of at most {AIM_NATS:g} {held}"
    )
