"""Samplers: how a sweep goes from noise to text. The estimate E is all that travels; every host can make the noise.

`ode` is the papers' deterministic sampler (DiffusionBlocks, arXiv 2506.14202). `stochastic` puts new noise on the last
denoised point at every step (consistency sampling: Song et al. 2023, arXiv 2303.01469, algorithm 1), and takes the
request's temperature at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from stages.model.noise import Trajectory
from stages.model.randomness import Purpose, normals


class Sampler(ABC):
    """The state of one chunk's slots."""

    name: str

    def __init__(
        self, seed: int, start: int, slots: int, code_dim: int, sigma_start: float, temperature: float
    ) -> None:
        """:param start: position of the first slot. :param temperature: the request's."""
        self.seed, self.start, self.slots, self.code_dim = seed, start, slots, code_dim
        self.sigma_start, self.temperature = sigma_start, temperature

    @property
    def point_temperature(self) -> float:
        """Temperature of the odds that a step goes by."""
        return 1.0

    @abstractmethod
    def state(self, estimate: Tensor, sigma: float, evaluation: int) -> Tensor:
        """z at `sigma`: (slots, code_dim). evaluation: how many this chunk has had before, those of earlier blocks
        included."""

    @abstractmethod
    def advance(self, estimate: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """E after a step with denoised point D: (slots, code_dim)."""

    def noise(self, evaluation: int) -> Tensor:
        """Standard normal numbers (slots, code_dim), the same on every host."""
        return normals(self.seed, Purpose.INITIAL_NOISE, self.start, self.slots, self.code_dim, evaluation)


# z0 = sigma_max * eps, not eps * sqrt(sigma_max^2 + sd^2): with sigma_max 10 and unit codes the two differ by 0.02 %.
class Ode(Sampler):
    """Euler steps of the probability-flow ODE: the initial noise decides everything."""

    name = "ode"

    def __init__(
        self, seed: int, start: int, slots: int, code_dim: int, sigma_start: float, temperature: float
    ) -> None:
        super().__init__(seed, start, slots, code_dim, sigma_start, temperature)
        self.trajectory = Trajectory(sigma_start)
        self.initial = sigma_start * self.noise(0)

    def state(self, estimate: Tensor, sigma: float, evaluation: int) -> Tensor:
        return self.trajectory.state(self.initial, estimate, sigma)

    def advance(self, estimate: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        return self.trajectory.advance(estimate, denoised, sigma, sigma_next)


class Stochastic(Sampler):
    """z = E + sigma eps with new eps for each evaluation, and E the last denoised point, as in training's
    self-conditioning."""

    name = "stochastic"

    @property
    def point_temperature(self) -> float:
        return self.temperature

    def state(self, estimate: Tensor, sigma: float, evaluation: int) -> Tensor:
        return estimate + sigma * self.noise(evaluation)

    def advance(self, estimate: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        return denoised


SAMPLERS: dict[str, type[Sampler]] = {sampler.name: sampler for sampler in (Stochastic, Ode)}
# Stochastic: new noise at each step lets later steps mend what earlier ones began, where the ODE keeps to its first
# noise. It also gives the temperature a meaning: at sigma_min the text is settled, and a read-out at any temperature
# gives the same bytes. Measured in docs/research/samplers.md.
DEFAULT_SAMPLER = Stochastic.name
