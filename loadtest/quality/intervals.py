"""95 % intervals over prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000  # the ends of an interval then vary by a few percent of its length
LEVEL = 95.0
NORMAL = 1.96  # standard deviations that hold LEVEL percent of a normal distribution


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval; None where there is no interval to give."""

    value: float
    low: float | None = None
    high: float | None = None


def flat(figures: Mapping[str, Estimate], names: Iterable[str]) -> dict[str, float | None]:
    """Each of `names` with its figure, and NAME_low and NAME_high with its interval; None for what there is not."""
    record = dict[str, float | None]()
    for name in names:
        estimate = figures.get(name)
        record[name] = estimate.value if estimate else None
        record[f"{name}_low"] = estimate.low if estimate else None
        record[f"{name}_high"] = estimate.high if estimate else None
    return record


def resampled(count: int, seed: int) -> NDArray[np.int64]:
    """Prompts drawn with replacement: (RESAMPLES, count)."""
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def ratio_of_sums(over: Sequence[float], under: Sequence[float], seed: int) -> Estimate | None:
    """Sum of `over` by sum of `under`, prompt by prompt, with a bootstrap interval; None where `under` is all 0."""
    a, b = np.asarray(over, float), np.asarray(under, float)
    if not b.sum():
        return None
    draws = resampled(len(a), seed)
    # a draw may hold only prompts with nothing below the line: it says nothing, and `percentiles` leaves it out
    with np.errstate(invalid="ignore", divide="ignore"):
        values = a[draws].sum(axis=1) / b[draws].sum(axis=1)
    return Estimate(float(a.sum() / b.sum()), *percentiles(values))


def difference_of_ratios(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]], seed: int
) -> Estimate:
    """`ratio_of_sums` of `first` less that of `second`, on the same prompts: drawn together, so paired."""
    a, b, c, d = (np.asarray(values, float) for values in (*first, *second))
    draws = resampled(len(a), seed)
    values = a[draws].sum(axis=1) / b[draws].sum(axis=1) - c[draws].sum(axis=1) / d[draws].sum(axis=1)
    return Estimate(float(a.sum() / b.sum() - c.sum() / d.sum()), *percentiles(values))


def around(value: float, error: float) -> Estimate:
    """The interval of a normal distribution with standard deviation `error`; none where that is not known."""
    return Estimate(value) if np.isnan(error) else Estimate(value, value - NORMAL * error, value + NORMAL * error)


def percentiles(values: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The interval that holds LEVEL percent of `values`."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None, None
    low, high = np.percentile(known, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)
