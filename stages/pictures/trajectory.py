"""From noise to pictures: noise levels, solvers, guidance, and the estimate E, which is all that hosts send.

With u = z / sigma the probability-flow ODE is du/dsigma = -D / sigma^2, so a step of any linear solver from sigma to
sigma' is z' = r z + (1 - r) D with r = sigma' / sigma and D a combination of denoised pictures. From z0 = sigma_0 eps
it follows that z = a z0 + (1 - a) E with a = sigma / sigma_0: every host makes z0 from the seed, and E is a weighted
mean of the denoised pictures so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, Self, get_args

from stages.device import Tensor
from stages.limits import MAX_SEED
from stages.model.architecture import DATA_STD, PictureArchitecture
from stages.model.partition import NoisePartition
from stages.model.randomness import Purpose, normals

Solver = Literal["euler", "2m"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)
DEFAULT_SOLVER: Solver = "2m"
# The paper's best value for one net. Block 0 spans 80 to 0.5, where a picture is only a shape, and the spacing decides
# how many of its steps see only noise.
RHO = 7.0  # spacing of noise levels: the larger, the closer together the small ones are (EDM, equation 5)
MAX_LEVELS = 256
MAX_PICTURES = 1024
MAX_GUIDANCE = 20.0
# Numbers of all pictures drawn together: 32 MB at four bytes each, so that the largest hop fits the messages of a host
# that was started for another release.
MAX_NUMBERS = 1 << 23
KEPT_NUMBERS = 1 << 12  # numbers of a picture whose noise is cached: 16 KB


@dataclass(frozen=True)
class DrawPlan:
    """Settings that every host must share to draw the same pictures. Picture i equals that of seed + i drawn alone."""

    seed: int
    classes: tuple[int, ...]  # one per picture; the number of classes stands for none
    levels: int  # steps from sigma_max to sigma_min; one more evaluation ends at sigma_min
    solver: Solver = DEFAULT_SOLVER
    guidance: float = 1.0  # D = D_none + guidance (D_class - D_none), arXiv 2207.12598; 1: one evaluation, not two

    @property
    def pictures(self) -> int:
        return len(self.classes)

    # Seeds count up within a request, so that a picture can be drawn again alone, and two hosts that divide a request's
    # pictures need not know of each other.
    @property
    def evaluations(self) -> int:
        """Pictures that a net evaluates at one noise level."""
        return self.pictures * evaluations(self.guidance)

    def conditions(self, architecture: PictureArchitecture) -> Tensor:
        """Classes of these evaluations, (evaluations,) int64: the pictures' own, then none for guidance."""
        return _conditions(self.classes, evaluations(self.guidance), len(architecture.classes))


def evaluations(guidance: float) -> int:
    """Evaluations per picture at one noise level."""
    return 1 if guidance == 1 else 2


# Cached: when each host made it again at every level, it took a twentieth of a small picture's time (undivided net).
@lru_cache(256)
def _conditions(classes: tuple[int, ...], times: int, none: int) -> Tensor:
    import torch

    return torch.tensor(classes + (none,) * (len(classes) * (times - 1)))


def max_pictures(architecture: PictureArchitecture, guidance: float) -> int:
    """Largest number of pictures drawn together."""
    a = architecture
    numbers = a.tokens * (a.features + 2 * a.patch_dim) * evaluations(guidance)
    return max(min(MAX_PICTURES, MAX_NUMBERS // numbers), 1)


def range_sigmas(high: float, low: float, steps: int) -> list[float]:
    """`steps` + 1 noise levels from `high` to `low`, equally spaced in sigma^(1/rho)."""
    top, bottom = high ** (1 / RHO), low ** (1 / RHO)
    return [high, *((top + i / steps * (bottom - top)) ** RHO for i in range(1, steps)), low]


def block_levels(partition: NoisePartition, levels: int) -> list[int]:
    """Steps of each block: the number of an undivided net's levels in the block's range, and at least one.

    levels: at least the number of blocks.
    """
    # Ranges of equal probability in training are not equally long for a solver: two in three of the net's steps are
    # above the first boundary. Equal numbers for all blocks gave larger Frechet distances (docs/research/pictures.md).
    widths = [high ** (1 / RHO) - low ** (1 / RHO) for high, low in pairwise(partition.boundaries)]
    steps = [1] * len(widths)
    for _ in range(levels - len(widths)):
        missing = [levels * width / sum(widths) - count for width, count in zip(widths, steps, strict=True)]
        steps[missing.index(max(missing))] += 1
    return steps


def block_sigmas(partition: NoisePartition, block: int, levels: int) -> list[float]:
    """Noise levels of one block if the whole chain makes `levels` steps."""
    high, low = partition.range(block)
    return range_sigmas(high, low, block_levels(partition, levels)[block])


@dataclass(frozen=True)
class PicturePiece:
    """Pictures to evaluate at one noise level."""

    x: Tensor  # c_in z, (pictures, tokens, patch_dim), or hidden states, (pictures, tokens, features)
    sigma: float
    classes: Tensor  # (pictures,) int64

    @property
    def rows(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    def split(self, count: int) -> list[Self]:
        """The same pictures in pieces of at most `count`."""
        parts = zip(self.x.split(count), self.classes.split(count), strict=True)
        return [replace(self, x=x, classes=classes) for x, classes in parts]


def skip_scale(sigma: float) -> float:
    """c_skip of EDM (arXiv 2206.00364, table 1)."""
    return DATA_STD**2 / (sigma**2 + DATA_STD**2)


def out_scale(sigma: float) -> float:
    """c_out."""
    return sigma * DATA_STD / math.sqrt(sigma**2 + DATA_STD**2)


def in_scale(sigma: float) -> float:
    """c_in: makes the state's variance 1."""
    return 1 / math.sqrt(sigma**2 + DATA_STD**2)


class Trajectory:
    """Pictures on their way through the noise levels of one block, or of an undivided net."""

    def __init__(
        self,
        architecture: PictureArchitecture,
        plan: DrawPlan,
        sigma_start: float,
        sigmas: Sequence[float],
        *,
        is_last: bool,
        estimate: Tensor | None = None,
        at: int = 0,
        before: Tensor | None = None,
    ) -> None:
        """:param sigma_start: the chain's sigma_max, the level of the seed's noise.
        :param sigmas: from `block_sigmas`; 2M starts afresh at the first of them.
        :param is_last: evaluate once more at the last level, which gives the picture.
        :param estimate: E from the block before, (pictures, tokens, patch_dim); None at `sigma_start`.
        :param at: the next level, with `before` and `estimate` from another trajectory at that level.
        """
        import torch

        a = self.architecture = architecture
        self.plan, self.sigma_start, self.sigmas, self.is_last = plan, sigma_start, list(sigmas), is_last
        self.at = at
        self.before = before  # D of the level before, for 2M
        self.estimate = torch.zeros(plan.pictures, a.tokens, a.patch_dim) if estimate is None else estimate
        self._held: Tensor | None = None  # z at the next level, once known
        self._noise = sigma_start * torch.stack([picture_noise(a, plan.seed + i) for i in range(plan.pictures)])

    @classmethod
    def whole(
        cls,
        architecture: PictureArchitecture,
        plan: DrawPlan,
        partition: NoisePartition,
        estimate: Tensor | None = None,
        at: int = 0,
        before: Tensor | None = None,
    ) -> "Trajectory":
        """A trajectory through all noise levels, for an undivided net."""
        high, low = partition.sigma_max, partition.sigma_min
        sigmas = range_sigmas(high, low, plan.levels)
        return cls(architecture, plan, high, sigmas, is_last=True, estimate=estimate, at=at, before=before)

    @property
    def done(self) -> bool:
        return self.at >= len(self.sigmas) - 1 + self.is_last

    @property
    def sigma(self) -> float:
        return self.sigmas[self.at]

    def piece(self) -> PicturePiece:
        """The pictures to evaluate next, once with their classes and, for guidance, once without."""
        x = (in_scale(self.sigma) * self._state()).repeat(evaluations(self.plan.guidance), 1, 1)
        return PicturePiece(x, self.sigma, self.plan.conditions(self.architecture))

    def supply(self, f: Tensor) -> None:
        """Continue with F for `piece`: (pictures, tokens, patch_dim)."""
        sigma = self.sigma
        if self.plan.guidance != 1:
            f, without = f.chunk(2)
            f = without + self.plan.guidance * (f - without)
        low, high = self.architecture.bounds
        # Clamped, so that E stays within the data's range under any guidance: a codec refuses larger values.
        denoised = (skip_scale(sigma) * self._state() + out_scale(sigma) * f).clamp(low, high)
        if self.at == len(self.sigmas) - 1:
            self.estimate = denoised
        else:
            after = self.sigmas[self.at + 1]
            point = denoised
            if self.plan.solver == "2m" and self.before is not None:
                ratio = math.log(self.sigmas[self.at - 1] / sigma) / math.log(sigma / after)
                # DPM-Solver++ 2M (arXiv 2211.01095, algorithm 2)
                point = (denoised + (denoised - self.before) / (2 * ratio)).clamp(low, high)
            r, a, a_after = after / sigma, sigma / self.sigma_start, after / self.sigma_start
            self.estimate = (r * (1 - a) * self.estimate + (1 - r) * point) / (1 - a_after)
            self.before = denoised
        self.at, self._held = self.at + 1, None

    def pixels(self) -> Tensor:
        """The pixels of E: (pictures, channels, height, width) uint8. At the end, they are the requested pictures."""
        return self.architecture.to_pixels(self.estimate)

    def _state(self) -> Tensor:
        """z at the next level: (pictures, tokens, patch_dim)."""
        if self._held is None:
            a = self.sigma / self.sigma_start
            self._held = a * self._noise + (1 - a) * self.estimate
        return self._held


def picture_noise(architecture: PictureArchitecture, seed: int) -> Tensor:
    """Standard normal numbers (tokens, patch_dim) of one picture: the same on every host."""
    a = architecture
    kept = a.tokens * a.patch_dim <= KEPT_NUMBERS
    return (_kept_noise if kept else _noise)(seed & MAX_SEED, a.tokens, a.patch_dim)


def _noise(seed: int, tokens: int, patch_dim: int) -> Tensor:
    return normals(seed, Purpose.INITIAL_NOISE, 0, tokens, patch_dim)


# Cached: a host of an undivided net needs it at every level, which took a tenth of the time of 16 pictures of 32 x 32.
_kept_noise = lru_cache(1024)(_noise)
