"""Results in aligned columns for a terminal, as markdown or as HTML, and the numbers in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from loadtest.report.page import text_table

R = TypeVar("R")
Column = tuple[str, Callable[[R], str]]  # a title, and the cell of a row below it


@dataclass(frozen=True)
class Table(Generic[R]):
    """Columns of a table, which is the same for a terminal and for a page."""

    columns: Sequence[Column[R]]
    text_columns: int = 1  # from the left, that are no figures

    @property
    def titles(self) -> list[str]:
        return [title for title, _ in self.columns]

    def cells(self, rows: Sequence[R]) -> list[list[str]]:
        return [[cell(row) for _, cell in self.columns] for row in rows]

    def aligned(self, rows: Sequence[R]) -> str:
        return aligned(self.titles, self.cells(rows))

    def markdown(self, rows: Sequence[R]) -> str:
        return markdown(self.titles, self.cells(rows))

    def html(self, rows: Sequence[R]) -> str:
        return text_table(self.titles, self.cells(rows), self.text_columns)


def text_column(title: str, name: str = "") -> Column[Any]:
    """A column with the value called `name`, as it is; `name` is the title where it is left out."""
    return title, lambda row: str(value_of(row, name or title))


def number_column(title: str, name: str, digits: int = 1, scale: float = 1) -> Column[Any]:
    """A column with the number called `name`, times `scale`; a dash where there is none."""

    def cell(row: object) -> str:
        value = value_of(row, name)
        return number(None if value is None else value * scale, digits)

    return title, cell


def value_of(row: object, name: str) -> Any:  # noqa: ANN401 - whatever a row holds
    """An entry of a mapping, or an attribute."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [_line(row, widths) for row in (header, ["-" * width for width in widths], *rows)]
    return "\n".join(lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a markdown table."""
    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def number(value: float | None, digits: int = 1) -> str:
    """A figure for a table; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Nearest rank: the smallest value that at least `percent` % of the values do not exceed. None of nothing.

    :param ordered: from small to large.
    """
    # in whole numbers, rounded up: 0.95 * 20 is a little more than 19, and its ceiling the wrong rank
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


@contextlib.contextmanager
def open_meter(name: str, total: int, unit: str = "text") -> Iterator[Callable[[int], object]]:
    """A progress bar for `total` units, gone at the end; yields what to call with the number of units just done.

    Nothing is shown where the output is no terminal.
    """
    from tqdm import tqdm

    with tqdm(desc=name, total=total, unit=unit, leave=False, disable=None) as bar:
        yield bar.update


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
