"""EDM's input scale and loss weight, Euler steps and the state formula, against forms that the code does not use."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.model.noise import Trajectory, edm_weight, euler_step, input_scale, step_sigmas

SIGMAS = st.floats(1e-3, 1e3)
DATA_STDS = st.floats(0.05, 2.0)


@given(SIGMAS, DATA_STDS)
def test_the_networks_input_has_unit_variance(sigma: float, sd: float) -> None:
    scale = float(input_scale(torch.tensor(sigma, dtype=torch.float64), sd))
    assert scale**2 * (sigma**2 + sd**2) == pytest.approx(1)


def test_the_networks_input_has_unit_variance_when_sampled() -> None:
    generator = torch.Generator().manual_seed(0)
    y = 0.3 * torch.randn(100_000, generator=generator)
    z = y + 0.7 * torch.randn(100_000, generator=generator)
    assert float((z * input_scale(torch.tensor(0.7), 0.3)).var()) == pytest.approx(1, abs=0.02)


@given(SIGMAS, DATA_STDS)
def test_the_weight_is_edms(sigma: float, sd: float) -> None:
    """Table 1: 1 / c_out^2 with c_out = sigma sd / sqrt(sigma^2 + sd^2)."""
    c_out = sigma * sd / math.hypot(sigma, sd)
    assert float(edm_weight(torch.tensor(sigma, dtype=torch.float64), sd)) == pytest.approx(c_out**-2)


# Euler steps


def end_of_gaussian_sweep(z: Tensor, high: float, low: float, steps: int, sd: float) -> Tensor:
    sigmas = step_sigmas(high, low, steps)
    for sigma, following in pairwise(sigmas):
        z = euler_step(z, z * sd**2 / (sd**2 + sigma**2), sigma, following)
    return z


def test_euler_converges_to_the_exact_solution_at_first_order() -> None:
    """For data ~ N(0, sd^2), the probability-flow ODE has z(sigma) proportional to sqrt(sd^2 + sigma^2)."""
    high, low, sd = 10.0, 0.15, 0.4
    z = torch.tensor([1.0, -3.0, 7.0], dtype=torch.float64)
    exact = z * math.sqrt((sd**2 + low**2) / (sd**2 + high**2))
    errors = [float((end_of_gaussian_sweep(z, high, low, n, sd) - exact).norm()) for n in (64, 128, 256, 512)]
    ratios = [coarse / fine for coarse, fine in pairwise(errors)]
    assert ratios == pytest.approx([2, 2, 2], abs=0.1)
    assert errors[-1] < 0.01 * float(exact.norm())


@given(SIGMAS, st.floats(0.01, 0.99), st.integers(1, 40))
def test_steps_are_equal_in_log_sigma(high: float, share: float, steps: int) -> None:
    sigmas = step_sigmas(high, high * share, steps)
    assert len(sigmas) == steps + 1
    assert (sigmas[0], sigmas[-1]) == (high, high * share)
    ratios = [low / high for high, low in pairwise(sigmas)]
    assert ratios == pytest.approx([share ** (1 / steps)] * steps)


# The state formula


@st.composite
def sweeps(draw: st.DrawFn) -> tuple[list[float], Tensor, Tensor]:
    """Falling noise levels, initial noise, and a unit-norm denoised point for each step."""
    ratios = draw(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=12))
    sigmas = [draw(st.floats(0.5, 100.0))]
    for ratio in ratios:
        sigmas.append(sigmas[-1] * ratio)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    points = torch.randn(len(ratios), 3, 5, generator=generator, dtype=torch.float64)
    initial = torch.randn(3, 5, generator=generator, dtype=torch.float64) * sigmas[0]
    return sigmas, initial, points / points.norm(dim=-1, keepdim=True)


@given(sweeps())
def test_seed_and_estimate_hold_the_whole_state(sweep: tuple[list[float], Tensor, Tensor]) -> None:
    sigmas, initial, points = sweep
    trajectory, z, estimate = Trajectory(sigmas[0]), initial, torch.zeros_like(initial)
    for sigma, following, point in zip(sigmas, sigmas[1:], points, strict=False):
        assert torch.allclose(trajectory.state(initial, estimate, sigma), z, rtol=1e-9, atol=1e-9)
        z = euler_step(z, point, sigma, following)
        estimate = trajectory.advance(estimate, point, sigma, following)
        assert float(estimate.norm(dim=-1).max()) <= 1 + 1e-9  # a weighted mean of unit vectors
    assert torch.allclose(trajectory.state(initial, estimate, sigmas[-1]), z, rtol=1e-9, atol=1e-9)


def test_the_estimate_after_one_step_is_the_denoised_point() -> None:
    point = torch.randn(4, 8)
    advanced = Trajectory(9.0).advance(torch.zeros(4, 8), point, 9.0, 3.0)
    assert torch.allclose(advanced, point, atol=1e-6)


def test_an_error_in_the_estimate_enters_the_state_by_one_minus_a() -> None:
    """Why a coarse codec does little harm at high noise."""
    trajectory, initial, estimate = Trajectory(10.0), torch.randn(2, 4), torch.randn(2, 4)
    moved = trajectory.state(initial, estimate + 0.5, 8.0) - trajectory.state(initial, estimate, 8.0)
    assert torch.allclose(moved, torch.full_like(moved, 0.5 * (1 - 0.8)), atol=1e-6)
