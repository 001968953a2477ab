"""A run in words: Markdown tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.chaos.table import seconds
from loadtest.load.accounting import percentile
from loadtest.training.account import lies_told, waits
from loadtest.training.proof import Proof
from loadtest.training.reference import final_nats
from loadtest.training.run import AIM_NATS, TrainingResult

SHOWN = 8
FAULT_HEAD = (
    "fault",
    "times",
    "next update p50 s",
    "max s",
    "next merge p50 s",
    "max s",
    "its own next update p50 s",
    "max s",
)
HAPPENED_HEAD = (
    "at s",
    "fault",
    "on",
    "for s",
    "next update s",
    "next merge s",
    "its own next update s",
    "what was hit",
)
LIE_HEAD = ("lie", "handed in", "accepted", "refused", "no verdict")
SCORE_HEAD = ("nats a byte", "undisturbed", "with faults", "difference")


@dataclass(frozen=True)
class Table:
    """What a run came to, in cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    """How many, from the left, are no figures."""


def tables(result: TrainingResult) -> list[Table]:
    """What matters most comes first."""
    return [
        Table("What it came to", SCORE_HEAD, score_rows(result)),
        Table("How long faults kept work away", FAULT_HEAD, fault_rows(result)),
        Table("Sabotage", LIE_HEAD, lie_rows(result)),
        Table("Faults", HAPPENED_HEAD, happened_rows(result), 0),
    ]


def fault_rows(result: TrainingResult) -> list[list[str]]:
    """A row for each kind."""
    rows = []
    for each in waits(result.happened):
        cells = [
            seconds(percentile(sorted(found), percent))
            for found in (each.accepted_s, each.merged_s, each.back_s)
            for percent in (50, 100)
        ]
        rows.append([each.kind, str(each.faults), *cells])
    return rows


def happened_rows(result: TrainingResult) -> list[list[str]]:
    """A row for each fault."""
    return [
        [
            f"{fault.begin_s - result.begin_s:.1f}",
            fault.kind,
            fault.target,
            f"{fault.end_s - fault.begin_s:.1f}",
            *(seconds(value) for value in (fault.accepted_s, fault.merged_s, fault.back_s)),
            fault.note or "-",
        ]
        for fault in result.happened
    ]


def lie_rows(result: TrainingResult) -> list[list[str]]:
    """A row for each kind of sabotage."""
    return [
        [lie, str(found.total()), *(str(found[outcome]) for outcome in ("accepted", "refused", "unknown"))]
        for lie, found in lies_told(result.verdicts).items()
    ]


def score_rows(result: TrainingResult) -> list[list[str]]:
    """A row for the end of each block; the last one is that of the model."""
    return [
        [name, f"{known:.4f}", f"{result.scores[name]:.4f}", f"{result.scores[name] - known:+.4f}"]
        for name, known in result.reference.scores.items()
        if name in result.scores
    ]


def verdict(result: TrainingResult) -> list[str]:
    """What came out, a sentence a line."""
    proof, taken = result.proof, (result.end_s - result.begin_s) / 60
    words = [
        f"{result.rounds} rounds of {result.run.parts} parts in {taken:.1f} min under {len(result.happened)} faults "
        f"({result.reference.seconds / 60:.1f} min without): " + ("the run ended" if result.finished else "NO END"),
        f"train audit: {result.audit}",
        _proof_words(proof),
        _gap_words(result),
    ]
    words += [f"wrong: {problem}" for problem in proof.problems[:SHOWN]]
    words += [f"{name} had ended: {last}" for name, last in result.ended.items()]
    words += [f"left out: {reason}" for reason in result.left_out]
    words += [f"of honest workers {n} x not taken: {why}" for why, n in result.refused.most_common(SHOWN)]
    reasons = {v["reason"] for v in result.verdicts if v["outcome"] == "refused"}
    return words + [f"to a saboteur: {reason}" for reason in sorted(reasons)[:SHOWN]]


def _proof_words(proof: Proof) -> str:
    if proof.problems:
        return f"{len(proof.problems)} problems with {proof.accepted} accepted updates"
    return (
        f"{proof.accepted} updates accepted, {proof.merged} merged; {proof.heard} times a worker heard that one was "
        f"taken, each in the log once; {proof.compared} hashed where they were made and again where they were taken"
    )


def _gap_words(result: TrainingResult) -> str:
    if result.gap_nats is None:
        return "no checkpoint to compare with the undisturbed run's"
    held = "holds" if result.gap_nats <= AIM_NATS else "does not hold"
    found, known = final_nats(result.scores), final_nats(result.reference.scores)
    return (
        f"{found:.4f} nats a byte at the end, {known:.4f} undisturbed: {result.gap_nats:+.4f}, "
        f"the aim of at most {AIM_NATS:g} {held}"
    )
