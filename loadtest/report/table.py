"""Results in aligned columns for a terminal, and the numbers in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence


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
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


@contextlib.contextmanager
def open_meter(name: str, total: int) -> Iterator[Callable[[int], object]]:
    """A progress bar for `total` texts, gone at the end; yields what to call with the number of texts just done.

    Nothing is shown where the output is no terminal.
    """
    from tqdm import tqdm

    with tqdm(desc=name, total=total, unit="text", leave=False, disable=None) as bar:
        yield bar.update


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
