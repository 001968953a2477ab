"""Tables of results for a terminal, and the formatting of numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from stages.progress import aligned

R = TypeVar("R")
Column = tuple[str, Callable[[R], str]]  # a title, and a function for a row's cell


def table(columns: Sequence[Column[R]], rows: Sequence[R]) -> str:
    """A table with a line for each row."""
    cells = [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]
    return "\n".join(aligned(cells, ruled=True))


def text_column(title: str, name: str = "") -> Column[Any]:
    """A column with the value called `name`, unchanged; `name` defaults to the title."""
    return title, lambda row: str(value_of(row, name or title))


def number_column(title: str, name: str, digits: int = 1, scale: float = 1) -> Column[Any]:
    """A column with the number called `name`, times `scale`; a dash for a missing one."""

    def cell(row: object) -> str:
        value = value_of(row, name)
        return number(None if value is None else value * scale, digits)

    return title, cell


def value_of(row: object, name: str) -> Any:  # noqa: ANN401 - whatever a row holds
    """An entry of a mapping or an attribute."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name)


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Nearest rank: the smallest value that at least `percent` % of the values do not exceed. None for no values.

    :param ordered: from small to large.
    """
    # in integers, rounded up: 0.95 * 20 is slightly more than 19, and its ceiling would be the wrong rank
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


# A progress bar that disappears at the end, and is shown only on a terminal.
open_meter = partial(tqdm, leave=False, disable=None)

RESAMPLES = 1000  # the ends of an interval then vary by a few percent of its length


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def ratio_of_sums(over: Sequence[float], under: Sequence[float], seed: int) -> Estimate | None:
    """Sum of `over` divided by sum of `under`, with a bootstrap interval over prompts; None if `under` is all 0."""
    a, b = np.asarray(over, float), np.asarray(under, float)
    if not b.sum():
        return None
    draws = np.random.default_rng(seed).integers(0, len(a), (RESAMPLES, len(a)))
    # a draw may hold only prompts with a zero denominator: leave it out
    with np.errstate(invalid="ignore"):
        values = a[draws].sum(axis=1) / b[draws].sum(axis=1)
    low, high = np.nanpercentile(values, (2.5, 97.5))
    return Estimate(float(a.sum() / b.sum()), float(low), float(high))
