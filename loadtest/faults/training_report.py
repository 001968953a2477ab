"""The report of a training under faults: sentences, tables and a JSON record."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from onesweep.loadtest.commands import BenchReport
from onesweep.loadtest.faults.proof import Proof
from onesweep.loadtest.faults.report import ReportTable, fault_report, seconds
from onesweep.loadtest.faults.training_run import AIM_NATS, TrainingFaultRecord, TrainingResult, final_nats
from onesweep.loadtest.report.table import percentile

SHOWN = 8
FAULT_HEAD = (
    *("fault", "times", "next update p50 s", "max s", "next merge p50 s", "max s"),
    *("its own next update p50 s", "max s"),
)
DONE_HEAD = ("at s", "fault", "on", "for s", "next update s", "next merge s", "its own next update s", "what was hit")
WAITS = ("accepted_s", "merged_s", "back_s")
LIE_HEAD = ("lie", "handed in", "accepted", "refused")
SCORE_HEAD = ("nats a byte", "undisturbed", "with faults", "difference")


def training_report(result: TrainingResult) -> BenchReport:
    """The report of `bench chaos-training`."""
    tables = report_tables(result)[::-1]
    return fault_report(tables, verdict(result), training_record(result), trouble=result.trouble)


def report_tables(result: TrainingResult) -> list[ReportTable]:
    """The most important one first."""
    kinds: dict[str, list[TrainingFaultRecord]] = {}
    for fault in result.faults:
        kinds.setdefault(fault.kind, []).append(fault)
    waits = [
        [kind, str(len(found)), *(cell for name in WAITS for cell in _waits(found, name))]
        for kind, found in kinds.items()
    ]
    faults = [
        [
            *(f"{fault.begin_s - result.begin_s:.1f}", fault.kind, fault.target, f"{fault.end_s - fault.begin_s:.1f}"),
            *(seconds(getattr(fault, name)) for name in WAITS),
            fault.note or "-",
        ]
        for fault in result.faults
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
        ReportTable("What it came to", SCORE_HEAD, scores),
        ReportTable("How long faults kept work away", FAULT_HEAD, waits),
        ReportTable("Sabotage", LIE_HEAD, lies),
        ReportTable("Faults", DONE_HEAD, faults),
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
        f"train audit: {result.audit}",
        _proof_words(result.proof),
        _gap_words(result),
    ]
    for other in result.others:
        words.append(f"seed {other.settings.seeds[0]}: {_proof_words(other.proof)}; {other.audit}")
    words += [f"wrong: {p}" for each in (result, *result.others) for p in each.proof.problems[:SHOWN]]
    words += [ending for other in result.others for ending in other.endings]
    words += [*result.endings, *result.omissions]
    words += [f"of honest workers {n} x not taken: {why}" for why, n in result.refused.most_common(SHOWN)]
    reasons = {v["reason"] for v in result.verdicts if v["outcome"] == "refused"}
    return words + [f"to a saboteur: {reason}" for reason in sorted(reasons)[:SHOWN]]


def training_record(result: TrainingResult) -> dict[str, Any]:
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
        "proof": asdict(result.proof),
        "audit": result.audit,
        "finished": result.finished,
        "ended": result.ended,
        "sabotage": result.verdicts,
        "honest_refusals": dict(result.refused),
        "log": [{"at_s": entry.at_s - begin_s, **entry.record} for entry in result.entries],
    }


def _proof_words(proof: Proof) -> str:
    if proof.problems:
        return f"{len(proof.problems)} problems with {proof.accepted} accepted updates"
    return (
        f"{proof.accepted} updates accepted, {proof.merged} merged; {proof.heard} times a worker heard that one was "
        f"taken, each in the log once; {proof.compared} hashed where they were made and again where they were taken"
    )


def _gap_words(result: TrainingResult) -> str:
    if result.gap is None:
        return "no checkpoint to compare with the undisturbed run's"
    held = "holds" if result.gap.mean <= AIM_NATS else "does not hold"
    found, known = final_nats(result.scores), final_nats(result.reference.scores)
    return (
        f"{found:.4f} nats a byte at the end of the first seed, {known:.4f} undisturbed; over {1 + len(result.others)} "
        f"seeds {result.gap}, the aim of at most {AIM_NATS:g} {held}"
    )
