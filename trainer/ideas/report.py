"""What a trial found: bits a byte by what a model was told, and texts under a judge."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

ALONE = "alone"
"""The arm without the idea."""


@dataclass(frozen=True)
class Told:
    """Bits a byte of validation text by a model that was told something, against the same model that never is."""

    arm: str
    told: str
    seed: int
    bits_per_byte: float
    gain: float
    error: float
    """Standard error of the gain, over windows."""


@dataclass(frozen=True)
class Written:
    """Texts of one kind under the judge, and how varied they are."""

    arm: str
    seed: int
    judge_bits_per_byte: float
    error: float
    byte_entropy: float
    gram_entropy: float
    sample: str


@dataclass(frozen=True)
class Report:
    told: list[Told]
    written: list[Written]

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def table(report: Report) -> list[str]:
    """Markdown rows: mean over seeds, and the standard error of the gain over windows (one seed) or over seeds."""
    lines = ["| arm | told | bits/byte | gain |", "|---|---|---|---|"]
    for arm, told in dict.fromkeys((row.arm, row.told) for row in report.told):
        rows = [row for row in report.told if (row.arm, row.told) == (arm, told)]
        gains = [row.gain for row in rows]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else rows[0].error
        gain = "" if arm == ALONE else f"{statistics.mean(gains):.3f} ± {error:.3f}"
        lines.append(f"| {arm} | {told} | {statistics.mean(row.bits_per_byte for row in rows):.3f} | {gain} |")
    if report.written:
        lines += ["", "| text | judge bits/byte | byte entropy | 4-gram entropy |", "|---|---|---|---|"]
    for arm in dict.fromkeys(row.arm for row in report.written):
        group = [row for row in report.written if row.arm == arm]
        lines.append(
            f"| {arm} | {statistics.mean(row.judge_bits_per_byte for row in group):.3f} "
            f"± {statistics.mean(row.error for row in group):.3f} "
            f"| {statistics.mean(row.byte_entropy for row in group):.2f} "
            f"| {statistics.mean(row.gram_entropy for row in group):.2f} |"
        )
    return lines
