"""A run under faults as tables and sentences for a terminal, and as a JSON record; shared by all targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from loadtest.commands import BenchReport
from loadtest.report.table import aligned, number


@dataclass(frozen=True)
class ReportTable:
    """Figures in cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def fault_report(
    tables: Sequence[ReportTable], verdict: Sequence[str], record: dict[str, Any], *, trouble: int
) -> BenchReport:
    """:param verdict: a sentence a line, below the tables that have rows.

    :param trouble: things that no run may have.
    """
    parts = [f"{table.title}:\n{aligned(table.head, table.rows)}" for table in tables if table.rows]
    parts.append("\n".join(f"- {words}" for words in verdict))
    return BenchReport("\n" + "\n\n".join(parts), record, holds=not trouble)


seconds = partial(number, digits=2)
