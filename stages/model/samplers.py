"""Samplers, which turn noise into text over a sweep. Only the estimate E is sent; every host can make the noise.

`ode` is the papers' deterministic sampler (DiffusionBlocks, arXiv 2506.14202). `stochastic` adds new noise to the last
denoised point at every step (consistency sampling: Song et al. 2023, arXiv 2303.01469, algorithm 1), and applies the
request's temperature at every step.
"""

from abc import ABC, abstractmethod
from functools import cached_property

from stages.device import Tensor
from stages.model.randomness import Purpose, normals


def input_scale(sigma: Tensor, data_std: float) -> Tensor:
    """c_in for a tensor of noise levels: makes the state's variance 1."""
    return (sigma * sigma + data_std * data_std).rsqrt()


def step_sigmas(high: float, low: float, steps: int) -> list[float]:
    """`steps` + 1 noise levels from `high` to `low`, equally spaced in log sigma."""
    ratio = low / high
    return [high * ratio ** (i / steps) for i in range(steps)] + [low]


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
        """Temperature of the probabilities that a step uses."""
        return 1.0

    @abstractmethod
    def state(self, estimate: Tensor, sigma: float, evaluation: int) -> Tensor:
        """z at `sigma`: (slots, code_dim). evaluation: number of evaluations that this chunk has had, including those
        of earlier blocks."""

    @abstractmethod
    def advance(self, estimate: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """E after a step with denoised point D: (slots, code_dim)."""

    def noise(self, evaluation: int) -> Tensor:
        """Standard normal numbers (slots, code_dim), the same on every host."""
        return normals(self.seed, Purpose.INITIAL_NOISE, self.start, self.slots, self.code_dim, evaluation)


class Ode(Sampler):
    """Euler steps of the probability-flow ODE: the initial noise decides everything.

    A step from sigma to sigma' is z' = r z + (1 - r) D with r = sigma' / sigma: linear in z. So the state is
    z = a z0 + (1 - a) E with a = sigma / sigma_0; z0 can be regenerated from a seed, and only E, a weighted mean of
    the denoised points D so far, needs to travel.
    """

    name = "ode"

    @cached_property
    def initial(self) -> Tensor:
        """z0."""
        # Not eps * sqrt(sigma_max^2 + sd^2): with sigma_max 10 and unit codes the two differ by 0.02 %.
        return self.sigma_start * self.noise(0)

    def state(self, estimate: Tensor, sigma: float, evaluation: int) -> Tensor:
        a = sigma / self.sigma_start
        return a * self.initial + (1 - a) * estimate

    def advance(self, estimate: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """From z' = r z + (1 - r) D: (1 - a') E' = r (1 - a) E + (1 - r) D."""
        ratio = sigma_next / sigma
        before, after = 1 - sigma / self.sigma_start, 1 - sigma_next / self.sigma_start
        return (ratio * before * estimate + (1 - ratio) * denoised) / after


class Stochastic(Sampler):
    """z = E + sigma eps with new eps for each evaluation; E is the last denoised point, as in training's
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
# Stochastic: with new noise at each step, later steps can correct earlier ones, where the ODE keeps its first noise. It
# also gives the temperature a meaning: at sigma_min the text is settled, and reading it out at any temperature gives
# the same bytes. Measured in docs/research/samplers.md.
DEFAULT_SAMPLER = Stochastic.name
