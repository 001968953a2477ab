"""The report of a training under faults: sentences, tables, JSON and panels of the time line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.faults.proof import Proof
from onesweep.loadtest.faults.report import TITLE, FaultReport, ReportTable, draw_faults, seconds
from onesweep.loadtest.faults.training_faults import TRAINING_FAULTS, TRAINING_WORDS
from onesweep.loadtest.faults.training_run import AIM_NATS, TrainingFaultRecord, TrainingResult, final_nats
from onesweep.loadtest.report.chart import COLOURS, FAINT, INK, Panel
from onesweep.loadtest.report.table import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 8
FAULT_HEAD = (
    *("fault", "times", "next update p50 s", "max s", "next merge p50 s", "max s"),
    *("its own next update p50 s", "max s"),
)
DONE_HEAD = ("at s", "fault", "on", "for s", "next update s", "next merge s", "its own next update s", "what was hit")
WAITS = ("accepted_s", "merged_s", "back_s")
LIE_HEAD = ("lie", "handed in", "accepted", "refused")
SCORE_HEAD = ("nats a byte", "undisturbed", "with faults", "difference")


def training_report(result: TrainingResult) -> FaultReport:
    """The report of `bench chaos-training`."""
    settings, tables = result.settings, report_tables(result)
    return FaultReport(
        run=result,
        title=f"A training of {result.rounds} rounds, {len(result.faults)} faults, profile {settings.profile}",
        verdict=verdict(result),
        trouble=result.trouble,
        tables=tables,
        printed=tables[::-1],
        faults=TRAINING_FAULTS,
        words=TRAINING_WORDS,
        settings={"seed of the schedule": settings.seed, "lease": f"{settings.lease_s:g} s"},
        record=training_record(result),
        height=7.0,
        panels=[
            Panel(2.2, lambda axes: _draw_faults(axes, result)),
            Panel(1.6, lambda axes: _draw_accepted(axes, result)),
            Panel(1.4, lambda axes: _draw_versions(axes, result)),
        ],
        text=result.run.text,
    )


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
        ReportTable("Faults", DONE_HEAD, faults, 0),
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


def _draw_faults(axes: Axes, result: TrainingResult) -> None:
    """A row for each worker and the coordinator."""
    names = sorted({fault.target for fault in result.faults}, reverse=True)
    title = "faults; a thin line: until the next update of its own was accepted"
    done = [(f, None if f.back_s is None else f.end_s + f.back_s) for f in result.faults]
    draw_faults(axes, done, TRAINING_FAULTS, result.begin_s, names, title)


def _draw_accepted(axes: Axes, result: TrainingResult) -> None:
    """A dot for each update; the hollow ones came late."""
    taken = [entry for entry in result.entries if entry.kind == "accepted"]
    names = sorted({entry.record["worker"] for entry in taken}, reverse=True)
    for late, fill in ((False, COLOURS[2]), (True, "none")):
        dots = [
            (entry.at_s - result.begin_s, names.index(entry.record["worker"]))
            for entry in taken
            if bool(entry.record["staleness"]) is late
        ]
        if dots:
            moments, places = zip(*dots, strict=True)
            axes.scatter(moments, places, s=9, facecolors=fill, edgecolors=COLOURS[2], linewidths=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.set_title("accepted updates; hollow: late", **TITLE)


def _draw_versions(axes: Axes, result: TrainingResult) -> None:
    parts = sorted({entry.part for entry in result.entries if entry.kind == "closed"})
    for part, colour in zip(parts, (*COLOURS, INK, FAINT), strict=False):
        closed = [entry for entry in result.entries if entry.kind == "closed" and entry.part == part]
        moments = [entry.at_s - result.begin_s for entry in closed]
        axes.step(moments, range(1, len(moments) + 1), where="post", color=colour, linewidth=1.2, label=part)
    axes.set_title("versions of each part", **TITLE)
    axes.legend(loc="upper left", frameon=False, fontsize=7)
