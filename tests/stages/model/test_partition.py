"""Noise partitions, against integrals that know nothing of the code's inverse CDF."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import ConfigError
from stages.model.partition import NoisePartition, equal_entropy, equal_probability

RANGES = st.tuples(st.floats(0.01, 1.0), st.floats(1.1, 80.0))


def prior_cdf(sigma: float, mean: float = -1.2, std: float = 1.2) -> float:
    return (1 + math.erf((math.log(sigma) - mean) / std / math.sqrt(2))) / 2


def test_the_partition_of_the_paper() -> None:
    """P_mean -1.2, P_std 1.2, [0.002, 80], B = 3: the prior's terciles lie at exp(-1.2 +- 1.2 * 0.4307)."""
    upper, lower = equal_probability(3, 0.002, 80.0).boundaries[1:3]
    assert (upper, lower) == pytest.approx((0.505, 0.180), abs=0.001)


@given(RANGES, st.integers(1, 12))
def test_every_range_has_the_same_mass(ends: tuple[float, float], blocks: int) -> None:
    """The density is integrated numerically over log sigma."""
    partition, mean, std = equal_probability(blocks, *ends), -1.2, 1.2
    masses = []
    for block in range(blocks):
        high, low = partition.range(block)
        x = np.linspace(math.log(low), math.log(high), 2001)
        masses.append(float(np.trapezoid(np.exp(-(((x - mean) / std) ** 2) / 2), x)))
    assert masses == pytest.approx([sum(masses) / blocks] * blocks, rel=1e-5)
    assert (partition.boundaries[-1], partition.boundaries[0]) == ends


@given(st.integers(1, 8), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30))
def test_entropy_falls_by_the_same_amount_in_every_range(blocks: int, rises: list[float]) -> None:
    sigmas = [0.15 * 1.2**i for i in range(len(rises) + 1)]
    nats = [0.1 + sum(rises[:i]) for i in range(len(rises) + 1)]
    partition = equal_entropy(blocks, sigmas, nats)
    at_boundaries = [float(np.interp(math.log(s), np.log(sigmas), nats)) for s in partition.boundaries]
    falls = [high - low for high, low in pairwise(at_boundaries)]
    assert falls == pytest.approx([sum(rises) / blocks] * blocks, rel=1e-6, abs=1e-6)


def test_a_dip_in_a_measured_curve_is_levelled() -> None:
    partition = equal_entropy(8, [0.1, 1.0, 2.5, 10.0], [0.0, 3.0, 2.0, 4.0])
    assert partition.boundaries[1] == pytest.approx(5, rel=1e-6)  # 3.5 nats, half way from the level of 3 to 4


# Training draws
def draws(partition: NoisePartition, block: int, count: int = 2000) -> list[float]:
    uniforms = (torch.arange(count, dtype=torch.float32) + 0.5) / count
    return partition.sample(block, uniforms).tolist()


@pytest.mark.parametrize("block", [0, 1, 2])
def test_draws_follow_the_prior_cut_to_the_widened_range(block: int) -> None:
    partition = equal_probability(3, 0.002, 80.0)
    high, low = partition.widened(block)
    sampled = draws(partition, block)
    bottom, mass = prior_cdf(low), prior_cdf(high) - prior_cdf(low)
    distance = max(abs((prior_cdf(s) - bottom) / mass - (i + 0.5) / len(sampled)) for i, s in enumerate(sampled))
    assert distance < 1e-3


@settings(max_examples=50)
@given(RANGES, st.integers(1, 6), st.floats(0, 0.5), st.sampled_from(["equal_probability", "uniform"]))
def test_draws_stay_in_the_widened_range(ends: tuple[float, float], blocks: int, overlap: float, kind: str) -> None:
    partition = replace(equal_probability(blocks, *ends, overlap=overlap), kind=kind)
    edges = torch.tensor([0.0, 1e-9, 0.5, 1 - 2**-24])
    for block in range(blocks):
        high, low = partition.widened(block)
        sampled = partition.sample(block, edges)
        assert low * (1 - 1e-4) <= float(sampled.min()) <= float(sampled.max()) <= high * (1 + 1e-4)


@given(RANGES, st.integers(1, 6), st.floats(0, 0.9))
def test_widening_adds_a_share_of_the_log_width_on_both_sides(ends, blocks: int, overlap: float) -> None:
    partition = equal_probability(blocks, *ends, overlap=overlap)
    (high, low), (wide_high, wide_low) = partition.range(0), partition.widened(0)
    margin = overlap * math.log(high / low)
    assert math.log(wide_high / high) == pytest.approx(margin, abs=1e-9)
    assert math.log(low / wide_low) == pytest.approx(margin, abs=1e-9)


# Refusals
@pytest.mark.parametrize(
    ("make", "parts", "reason"),
    [
        *((NoisePartition, ("equal_entropy", each), "finite and positive") for each in ((1.0,), (1.0, 0.0))),
        *((NoisePartition, ("equal_entropy", each), "finite and pos") for each in ((math.inf, 1.0), (1.0, math.nan))),
        *((NoisePartition, ("equal_entropy", each), "must fall") for each in ((1.0, 2.0), (2.0, 1.0, 1.0))),
        (equal_probability, (0, 0.1, 1.0), "noise partition"),
        *((equal_probability, (2, *each), "noise partition") for each in ((1.0, 1.0), (2.0, 1.0), (0.0, 1.0))),
        (equal_probability, (2, 0.1, math.inf), "noise partition"),
        (equal_entropy, (2, [0.0, 1.0], [1.0, 2.0]), "0 < min"),
        (equal_entropy, (2, [1.0, 2.0], [2.0, 1.0]), "rises with sigma"),
        (equal_entropy, (2, [1.0, 2.0], [1.0, math.nan]), "rises with sigma"),
    ],
)
def test_an_invalid_partition_is_refused(make: Callable[..., NoisePartition], parts: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(*parts)
