"""The slope of a straight line, and how sure it is, against closed forms."""

import math
import random
from typing import Any

import pytest

from onesweep.loadtest.faults.growth import LEAST_SAMPLES, slope_of


def test_a_straight_line_is_found_exactly() -> None:
    slope: Any = slope_of(range(60), [5 + 2 * t for t in range(60)])
    assert slope.per_minute == pytest.approx(120)
    assert slope.margin == pytest.approx(0, abs=1e-9)
    assert slope.grows(119)
    assert not slope.grows(120.1)


def test_noise_that_alternates_has_the_margin_of_the_textbook() -> None:
    """Residuals of +1 and -1 in turn are no likelier to be alike than not, so every sample counts."""
    n = 200
    slope: Any = slope_of(range(n), [(-1.0) ** t for t in range(n)])
    error = math.sqrt(n / (n - 2) / (n * (n * n - 1) / 12))  # sigma / sqrt(sum of (t - mean)^2)
    assert slope.margin == pytest.approx(1.96 * 60 * error, rel=1e-3)
    assert not slope.grows(-1000)


def test_samples_that_follow_each_other_count_less() -> None:
    chance = random.Random(1)
    values = [chance.gauss(0, 1)]
    for _ in range(2000):
        values.append(0.8 * values[-1] + chance.gauss(0, 1))
    slope, shuffled = slope_of(range(2001), values), slope_of(range(2001), chance.sample(values, 2001))
    assert slope.margin / shuffled.margin == pytest.approx(math.sqrt(1.8 / 0.2), rel=0.15)


def test_too_little_has_no_slope() -> None:
    assert slope_of(range(LEAST_SAMPLES - 1), [0.0] * (LEAST_SAMPLES - 1)) is None
    assert slope_of([3.0] * 20, [1.0] * 20) is None
