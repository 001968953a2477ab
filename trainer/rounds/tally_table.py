"""What real workers came to: who worked, whose work counted, who waited."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from trainer.rounds.comparison import Result
from trainer.rounds.engine.base import Tally


def tally_table(results: Sequence[Result]) -> list[str]:
    """Markdown rows, one an arm, in means over the seeds; nothing where all workers were virtual."""
    by_arm: dict[str, list[Result]] = {}
    for result in results:
        if result.tallies:
            by_arm.setdefault(result.arm, []).append(result)
    if not by_arm:
        return []
    return [
        "",
        "| arm | next_byte | seconds | steps made, worker by worker | of these merged | trained |",
        "|---|---|---|---|---|---|",
        *(_row(arm, rows) for arm, rows in by_arm.items()),
    ]


def _row(arm: str, rows: Sequence[Result]) -> str:
    made = _each(rows, lambda tally, row: tally.made, "{:.0f}")
    merged = _each(rows, lambda tally, row: tally.merged, "{:.0f}")
    trained = _each(rows, lambda tally, row: min(tally.busy_s / row.seconds, 1.0), "{:.0%}")
    nats = statistics.mean(row.losses["next_byte"] for row in rows)
    seconds = statistics.mean(row.seconds for row in rows)
    return f"| {arm} | {nats:.3f} | {seconds:.1f} | {made} | {merged} | {trained} |"


def _each(rows: Sequence[Result], value: Callable[[Tally, Result], float], shown: str) -> str:
    """Of every worker, its mean over the seeds."""
    values = [[value(tally, row) for tally in row.tallies] for row in rows]
    return " / ".join(shown.format(statistics.mean(column)) for column in zip(*values, strict=True))
