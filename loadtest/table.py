"""Figures in aligned columns, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [_line(row, widths) for row in (header, ["-" * width for width in widths], *rows)]
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
