"""Samplers: what a state is made of, and that nothing but E needs to travel."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.model.randomness import Purpose, normals
from stages.model.samplers import DEFAULT_SAMPLER, SAMPLERS, Ode, Sampler, Stochastic, step_sigmas

SIGMAS = step_sigmas(9.0, 0.3, 5)
NAMES = pytest.mark.parametrize("name", list(SAMPLERS))


def open_sampler(name: str, temperature: float = 0.8) -> Sampler:
    return SAMPLERS[name](seed=5, start=7, slots=6, code_dim=8, sigma_start=9.0, temperature=temperature)


def points() -> list[torch.Tensor]:
    return list(torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(1)))


@NAMES
def test_a_sweep_begins_with_noise_alone(name: str) -> None:
    state = open_sampler(name).state(torch.zeros(6, 8), 9.0, 0)
    assert torch.equal(state, 9.0 * normals(5, Purpose.INITIAL_NOISE, 7, 6, 8))


@NAMES
def test_a_host_that_takes_over_needs_only_the_estimate(name: str) -> None:
    sampler, estimate = open_sampler(name), torch.zeros(6, 8)
    for evaluation, (point, sigma, following) in enumerate(zip(points(), SIGMAS, SIGMAS[1:], strict=False)):
        assert torch.equal(
            open_sampler(name).state(estimate, sigma, evaluation), sampler.state(estimate, sigma, evaluation)
        )
        estimate = sampler.advance(estimate, point, sigma, following)


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


def test_the_stochastic_sampler_draws_new_noise_for_every_evaluation() -> None:
    sampler, (point, *_) = open_sampler("stochastic"), points()
    assert torch.equal(sampler.advance(torch.zeros(6, 8), point, 9.0, 3.0), point)
    first, second = (sampler.state(point, 3.0, evaluation) - point for evaluation in (1, 2))
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.4
    assert torch.allclose(second, 3.0 * normals(5, Purpose.INITIAL_NOISE, 7, 6, 8, step=2), atol=1e-6)


def test_the_temperature_counts_at_every_step_where_it_means_something() -> None:
    assert (Stochastic.name, Ode.name) == tuple(SAMPLERS)
    assert open_sampler(DEFAULT_SAMPLER, 0.3).point_temperature == 0.3
    assert open_sampler("ode", 0.3).point_temperature == 1.0
