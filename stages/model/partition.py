"""Noise partitions: which block takes which range of sigma."""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

from stages.device import Tensor
from stages.errors import ConfigError

Kind = Literal["equal_probability", "equal_entropy", "uniform"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class LogNormalPrior:
    """ln(sigma) ~ N(mean, std^2), truncated. The papers use mean -1.2, std 1.2."""

    mean: float = -1.2
    std: float = 1.2

    def __post_init__(self) -> None:
        if not math.isfinite(self.mean) or not 0 < self.std < math.inf:
            raise ConfigError(f"noise partition: a prior needs a finite mean and a positive std, not {self}")


@dataclass(frozen=True)
class NoisePartition:
    """B noise ranges from `boundaries[0]` (sigma_max, block 0) down to `boundaries[B]` (sigma_min)."""

    kind: Kind
    boundaries: tuple[float, ...]
    prior: LogNormalPrior = LogNormalPrior()
    # Share of a block's log-width by which training widens its range on both sides (gamma).
    overlap: float = 0.05

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"noise partition: unknown kind {self.kind!r}; choose from {', '.join(KINDS)}")
        bounds = self.boundaries
        if len(bounds) < 2 or not all(math.isfinite(s) and s > 0 for s in bounds):
            raise ConfigError(f"noise partition: boundaries must be finite and positive, not {bounds}")
        if any(high <= low for high, low in pairwise(bounds)):
            raise ConfigError(f"noise partition: boundaries must fall from sigma_max to sigma_min, not {bounds}")
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"noise partition: overlap must be in [0, 1), not {self.overlap}")

    @property
    def sigma_max(self) -> float:
        return self.boundaries[0]

    @property
    def sigma_min(self) -> float:
        return self.boundaries[-1]

    def range(self, block: int) -> tuple[float, float]:
        """(high, low) sigma of a block, as served."""
        return self.boundaries[block], self.boundaries[block + 1]

    def widened(self, block: int) -> tuple[float, float]:
        """(high, low) sigma of a block, as trained."""
        high, low = self.range(block)
        margin = (high / low) ** self.overlap
        return high * margin, low / margin

    def sample(self, block: int, uniform: Tensor) -> Tensor:
        """Training noise levels of a block from uniform numbers in [0, 1), any shape.

        Under `equal_probability` they follow the prior cut to the block's range, else log(sigma) is uniform.
        """
        import torch

        high, low = self.widened(block)
        if self.kind != "equal_probability":
            return torch.exp(math.log(low) + uniform * math.log(high / low))
        normal = NormalDist(self.prior.mean, self.prior.std)
        q_low, q_high = normal.cdf(math.log(low)), normal.cdf(math.log(high))
        quantile = (q_low + uniform.double() * (q_high - q_low)).clamp(1e-12, 1 - 1e-12)
        return torch.exp(self.prior.mean + self.prior.std * torch.special.ndtri(quantile)).to(uniform.dtype)


def equal_probability(blocks: int, sigma_min: float, sigma_max: float, overlap: float = 0.05) -> NoisePartition:
    """Ranges of equal mass under the truncated log-normal prior (DiffusionBlocks section 3.3).

    sigma_b = exp(P_mean + P_std * Phi^-1(q_b)), q_b equally spaced between the truncation points.
    Raises ConfigError for a range that is empty, or so far in the prior's tail that it has no mass to share.
    """
    _check_range(blocks, sigma_min, sigma_max)
    prior = LogNormalPrior()
    normal = NormalDist(prior.mean, prior.std)
    q_min, q_max = normal.cdf(math.log(sigma_min)), normal.cdf(math.log(sigma_max))
    if q_max - q_min < 1e-9:  # rounding of the CDF would show in the boundaries
        raise ConfigError(f"noise partition: the prior has no mass to share in [{sigma_min:g}, {sigma_max:g}]")
    inner = [math.exp(normal.inv_cdf(q_max + (q_min - q_max) * b / blocks)) for b in range(1, blocks)]
    return NoisePartition("equal_probability", (sigma_max, *inner, sigma_min), prior, overlap)


def _check_range(blocks: int, sigma_min: float, sigma_max: float) -> None:
    if blocks < 1:
        raise ConfigError(f"noise partition: needs at least one block, not {blocks}")
    if not 0 < sigma_min < sigma_max < math.inf:
        raise ConfigError(f"noise partition: sigma must have 0 < min < max, not [{sigma_min:g}, {sigma_max:g}]")


def equal_entropy(
    blocks: int, sigmas: list[float], cross_entropies: list[float], overlap: float = 0.05
) -> NoisePartition:
    """Ranges over which the measured cross-entropy falls by equal amounts (CDCD, arXiv 2211.15089).

    `cross_entropies[i]` is the CE (nats) measured at `sigmas[i]`; sigmas rise. The curve is made monotone.
    """
    _check_range(blocks, sigmas[0], sigmas[-1])
    log_sigma = np.log(np.asarray(sigmas, dtype=np.float64))
    curve = np.maximum.accumulate(np.asarray(cross_entropies, dtype=np.float64))
    if not np.all(np.isfinite(curve)) or curve[-1] <= curve[0]:
        raise ConfigError("noise partition: equal_entropy needs a cross-entropy that rises with sigma")
    curve = curve + np.linspace(0, 1e-9, len(curve))  # strictly rising, so that it can be inverted
    levels = [curve[-1] + (curve[0] - curve[-1]) * b / blocks for b in range(1, blocks)]
    inner = [float(np.exp(np.interp(level, curve, log_sigma))) for level in levels]
    return NoisePartition("equal_entropy", (float(sigmas[-1]), *inner, float(sigmas[0])), overlap=overlap)
