"""The ODE sampler, against Euler steps and an exact solution; tests/stages/backends/test_sweep.py has whole sweeps."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.model.samplers import Ode, input_scale, step_sigmas


def euler_step(z: Tensor, denoised: Tensor, sigma: float, following: float) -> Tensor:
    """EDM, algorithm 1, with the slope (z - D) / sigma."""
    return z + (following - sigma) * (z - denoised) / sigma


@st.composite
def sweeps(draw: st.DrawFn) -> tuple[list[float], Tensor, Tensor]:
    """Falling noise levels, initial noise, and a unit-norm denoised point for each step."""
    ratios = draw(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=12))
    sigmas = [draw(st.floats(0.5, 100.0))]
    for ratio in ratios:
        sigmas.append(sigmas[-1] * ratio)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    drawn = torch.randn(len(ratios), 6, 8, generator=generator, dtype=torch.float64)
    initial = torch.randn(6, 8, generator=generator, dtype=torch.float64) * sigmas[0]
    return sigmas, initial, drawn / drawn.norm(dim=-1, keepdim=True)


@given(sweeps())
def test_the_ode_is_euler_steps(sweep: tuple[list[float], Tensor, Tensor]) -> None:
    sigmas, z, points = sweep
    sampler, estimate = ode(sigmas[0], z), torch.zeros_like(z)
    for (sigma, following), point in zip(pairwise(sigmas), points, strict=True):
        assert torch.allclose(sampler.state(estimate, sigma, 0), z, rtol=1e-9, atol=1e-9)
        z = euler_step(z, point, sigma, following)
        estimate = sampler.advance(estimate, point, sigma, following)
        assert float(estimate.norm(dim=-1).max()) <= 1 + 1e-9  # a weighted mean of unit vectors
    assert torch.allclose(sampler.state(estimate, sigmas[-1], 0), z, rtol=1e-9, atol=1e-9)


def ode(sigma_start: float, initial: Tensor) -> Ode:
    sampler = Ode(seed=5, start=7, slots=6, code_dim=8, sigma_start=sigma_start, temperature=0.8)
    sampler.initial = initial
    return sampler


def test_the_ode_converges_to_the_exact_solution_at_first_order() -> None:
    """For data ~ N(0, sd^2), the probability-flow ODE has z(sigma) proportional to sqrt(sd^2 + sigma^2)."""
    high, low, sd = 10.0, 0.15, 0.4
    z = torch.tensor([1.0, -3.0, 7.0], dtype=torch.float64)
    exact = z * math.sqrt((sd**2 + low**2) / (sd**2 + high**2))
    errors = []
    for steps in (64, 128, 256, 512):
        sampler, estimate = ode(high, z), torch.zeros_like(z)
        for sigma, following in pairwise(step_sigmas(high, low, steps)):
            point = sampler.state(estimate, sigma, 0) * sd**2 / (sd**2 + sigma**2)
            estimate = sampler.advance(estimate, point, sigma, following)
        errors.append(float((sampler.state(estimate, low, 0) - exact).norm()))
    assert [coarse / fine for coarse, fine in pairwise(errors)] == pytest.approx([2, 2, 2], abs=0.1)
    assert errors[-1] < 0.01 * float(exact.norm())


# EDM's input scale and noise levels, against forms that the code does not use.
SIGMAS = st.floats(1e-3, 1e3)
DATA_STDS = st.floats(0.05, 2.0)


@given(SIGMAS, DATA_STDS)
def test_the_networks_input_has_unit_variance(sigma: float, sd: float) -> None:
    scale = float(input_scale(torch.tensor(sigma, dtype=torch.float64), sd))
    assert scale**2 * (sigma**2 + sd**2) == pytest.approx(1)


@given(SIGMAS, st.floats(0.01, 0.99), st.integers(1, 40))
def test_steps_are_equal_in_log_sigma(high: float, share: float, steps: int) -> None:
    sigmas = step_sigmas(high, high * share, steps)
    assert len(sigmas) == steps + 1
    assert (sigmas[0], sigmas[-1]) == (high, high * share)
    ratios = [low / high for high, low in pairwise(sigmas)]
    assert ratios == pytest.approx([share ** (1 / steps)] * steps)
