"""Judge bits at matched entropy: between the temperatures where an arm's text is as varied as human text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from loadtest.quality.intervals import Estimate
from loadtest.quality.row import AT_HUMAN_ENTROPY, GRAMS, HUMAN, JUDGED, QualityRow


def at_human_entropy(rows: Sequence[QualityRow], human: QualityRow) -> list[QualityRow]:
    """The rows with AT_HUMAN_ENTROPY, the same for rows that differ in temperature only.

    Linear in the 4-gram entropy between two neighbouring temperatures, and so are the ends of its interval. None where
    no two temperatures of an arm have the human entropy between them.
    """
    return [row if row.mode == HUMAN else _completed(row, _same_arm(row, rows), human) for row in rows]


def _same_arm(row: QualityRow, rows: Sequence[QualityRow]) -> list[QualityRow]:
    alike = [
        other for other in rows if other.mode != HUMAN and _without_temperature(other) == _without_temperature(row)
    ]
    return sorted(alike, key=lambda other: other.temperature or 0.0)


def _without_temperature(row: QualityRow) -> str:
    return ":".join(part for part in row.spec.split(":") if not part.startswith("temperature="))


def _completed(row: QualityRow, arm: Sequence[QualityRow], human: QualityRow) -> QualityRow:
    estimate, reason = _between(arm, human)
    if estimate is not None:
        return replace(row, figures=row.figures | {AT_HUMAN_ENTROPY: estimate})
    return replace(row, reasons=row.reasons | {AT_HUMAN_ENTROPY: reason})


def _between(arm: Sequence[QualityRow], human: QualityRow) -> tuple[Estimate | None, str]:
    wanted = human.figure(GRAMS)
    if wanted is None:
        return None, "the human text has no 4-gram entropy"
    if len(arm) < 2:
        return None, "one temperature only (--temperatures)"
    for colder, warmer in pairwise(arm):
        low, high = colder.figure(GRAMS), warmer.figure(GRAMS)
        if low is None or high is None or not min(low, high) <= wanted <= max(low, high):
            continue
        share = (wanted - low) / (high - low) if high != low else 0.0
        return _mixed(colder.figures[JUDGED], warmer.figures[JUDGED], share), ""
    return None, f"no two temperatures have the human 4-gram entropy, {wanted:.2f} bits, between them"


def _mixed(first: Estimate, second: Estimate, share: float) -> Estimate:
    def between(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + share * (b - a)

    value = first.value + share * (second.value - first.value)
    return Estimate(value, between(first.low, second.low), between(first.high, second.high))
