"""Rows for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.quality.row import AT_HUMAN_ENTROPY, DERIVED, PANEL, QualityRow
from loadtest.table import aligned

COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("judge_bits_per_byte", "judge bits", 3),
    ("ngram_bits_per_byte", "n-gram bits", 3),
    ("byte_entropy", "byte ent", 2),
    ("gram_entropy", "4-gram ent", 2),
    ("word_entropy", "word ent", 2),
    ("distinct_2", "distinct-2", 3),
    ("auc", "auc", 3),
    ("mauve", "mauve", 3),
    ("unseen_words", "unseen", 3),
    ("copied_spans", "copied", 3),
)
EXTRA: tuple[tuple[str, str, int], ...] = (
    ("judge_minus_human", "- human", 3),
    ("judge_minus_local", "- local", 3),
    (AT_HUMAN_ENTROPY, "at human entropy", 3),
    ("joined_bits_per_byte", "joined bits", 3),
    ("exact_match", "exact", 3),
)
COSTS: tuple[tuple[str, str, int], ...] = (
    ("sweeps", "sweeps", 1),
    ("seconds", "s", 3),
    ("host_seconds", "host-s", 3),
)


def quality_table(rows: Sequence[QualityRow]) -> str:
    """Figures without their intervals, which the other table has."""
    header = ("mode", *(title for _, title, _ in (*COSTS, *COLUMNS)))
    body = [
        (
            row.spec or row.mode,
            *(number(getattr(row, name), digits) for name, _, digits in COSTS),
            *(number(row.figure(name), digits) for name, _, digits in COLUMNS),
        )
        for row in rows
    ]
    return aligned(header, body)


def interval_table(rows: Sequence[QualityRow]) -> str:
    """The judge's figures with their 95 % intervals."""
    shown = [COLUMNS[0], *(column for column in EXTRA if any(column[0] in row.figures for row in rows))]
    header = ("mode", *(title for _, title, _ in shown))
    return aligned(header, [(row.spec or row.mode, *(interval(row, n, d) for n, _, d in shown)) for row in rows])


def reasons(rows: Sequence[QualityRow]) -> list[str]:
    """Why figures are missing: a sentence for each reason, with the rows that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.reasons.items():
            found.setdefault((name, reason), []).append(row.spec or row.mode)
    return [
        f"no {name}{'' if len(who) == len(rows) else ' of ' + ', '.join(who)}: {reason}"
        for (name, reason), who in found.items()
    ]


def meanings() -> list[tuple[str, str]]:
    """Each column's title and its sentence."""
    titles = {name: title for name, title, _ in (*COLUMNS, *EXTRA)}
    return [(titles[name], sentence) for name, sentence in (PANEL | DERIVED).items()]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def interval(row: QualityRow, name: str, digits: int) -> str:
    """A figure with what lies within 95 %."""
    estimate = row.figures.get(name)
    if estimate is None or estimate.low is None or estimate.high is None:
        return number(row.figure(name), digits)
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
