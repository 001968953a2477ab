"""Results of ways of making rounds as Markdown: one row an arm, means over the seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from trainer.rounds.comparison import Result

Rows = Sequence[Result]
"""Of one arm, a seed each."""

T95 = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom; 1.96 beyond."""


def _mean(value: Callable[[Result], float], form: str) -> Callable[[Rows], str]:
    return lambda rows: format(statistics.mean(map(value, rows)), form)


def _share(kind: str) -> Callable[[Result], float]:
    return lambda row: row.updates.get(kind, 0) / max(sum(row.updates.values()), 1)


COLUMNS: Mapping[str, Callable[[Rows], str]] = {
    "rounds": lambda rows: str(rows[0].rounds),
    "up MB": _mean(lambda row: row.up_bytes / row.workers / 1e6, ".2f"),
    "down MB": _mean(lambda row: row.down_bytes / row.workers / 1e6, ".2f"),
    "copies MB": _mean(lambda row: row.copies_bytes / row.workers / 1e6, ".2f"),
    "features MB": _mean(lambda row: row.features_bytes / row.workers / 1e6, ".2f"),
    "in time": _mean(_share("in time"), ".0%"),
    "late": _mean(_share("late"), ".0%"),
    "not merged": _mean(lambda row: max(1 - _share("in time")(row) - _share("late")(row), 0.0), ".0%"),
    "work": _mean(lambda row: row.work, ".0%"),
    "busy": _mean(lambda row: row.busy, ".0%"),
    "hours": _mean(lambda row: row.seconds / 3600, ".2f"),
    "worker MB": _mean(lambda row: row.memory_bytes / 1e6, ".2f"),
    "held copies MB": _mean(lambda row: row.held_copies_bytes / 1e6, ".2f"),
    "GFLOP a step": _mean(lambda row: row.step_gflop, ".3f"),
    "coordinator GFLOP a step": _mean(lambda row: row.feeding_gflop, ".3f"),
}
OF_ROUNDS = (
    *("rounds", "up MB", "down MB", "copies MB", "features MB"),
    *("in time", "late", "not merged", "work", "busy", "hours"),
)


def table(
    results: Rows, losses: Sequence[str] = (), columns: Sequence[str] = OF_ROUNDS, against: str = ""
) -> list[str]:
    """Markdown rows.

    :param losses: names of losses; without any the next byte's, of a chain also of its earlier blocks.
    :param against: an arm; differences of the first loss from it, seed by seed, with a 95 % interval over the seeds.
    """
    by_arm: dict[str, list[Result]] = {}
    for result in results:
        by_arm.setdefault(result.arm, []).append(result)
    if not losses:
        blocks = [name for name in results[0].losses if name.endswith(" next_byte")] if results else []
        losses = ("next_byte", *blocks[:-1])
    marked = [f"against {against}"] if against else []
    heads = ["arm", "seeds", *losses, *marked, *columns]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for arm, rows in by_arm.items():
        cells = [arm, str(len(rows)), *(_spread([_loss(row, name) for row in rows]) for name in losses)]
        if against:
            cells.append(_difference(rows, by_arm.get(against, []), losses[0]) if arm != against else "")
        cells += [COLUMNS[name](rows) for name in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _loss(row: Result, name: str) -> float:
    return row.losses.get(name, math.nan)


def _difference(rows: Rows, marks: Rows, loss: str) -> str:
    by_seed = {mark.seed: _loss(mark, loss) for mark in marks}
    found = [_loss(row, loss) - by_seed[row.seed] for row in rows if row.seed in by_seed]
    if not found:
        return ""
    mean = f"{statistics.mean(found):+.3f}"
    if len(found) == 1:
        return mean
    quantile = T95[len(found) - 1] if len(found) <= len(T95) else 1.96
    return f"{mean} ± {quantile * statistics.stdev(found) / math.sqrt(len(found)):.3f}"


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean
