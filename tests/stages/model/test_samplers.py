"""Samplers: what a state is made of, and that nothing but E needs to travel."""

from __future__ import annotations

import pytest
import torch

from stages.model.noise import euler_step, step_sigmas
from stages.model.randomness import Purpose, normals
from stages.model.samplers import DEFAULT_SAMPLER, SAMPLERS, Ode, Sampler, Stochastic

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


def test_the_ode_is_euler_steps() -> None:
    sampler, estimate = open_sampler("ode"), torch.zeros(6, 8)
    z = sampler.state(estimate, 9.0, 0)
    for evaluation, (point, sigma, following) in enumerate(zip(points(), SIGMAS, SIGMAS[1:], strict=False)):
        z = euler_step(z, point, sigma, following)
        estimate = sampler.advance(estimate, point, sigma, following)
        assert torch.allclose(sampler.state(estimate, following, evaluation + 1), z, atol=1e-5)


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
