"""The way from noise to pictures, against exact solutions."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from stages.pictures.trajectory import (
    DrawPlan,
    PicturePiece,
    Solver,
    Trajectory,
    block_levels,
    block_sigmas,
    in_scale,
    out_scale,
    picture_noise,
    range_sigmas,
    skip_scale,
)
from tests.stages.pictures.tiny import SIGMA_MAX, SIGMA_MIN, TINY, tiny_partition

MEAN, DEVIATION = 0.2, 0.1  # for data that are one Gaussian, as the net sees them: within black and white


def ideal(piece: PicturePiece) -> Tensor:
    """F of the best denoiser of such data, which is linear."""
    sigma = piece.sigma
    z = piece.x / in_scale(sigma)
    denoised = (DEVIATION**2 * z + sigma**2 * MEAN) / (DEVIATION**2 + sigma**2)
    return (denoised - skip_scale(sigma) * z) / out_scale(sigma)


def drawn(plan: DrawPlan) -> Tensor:
    """E at the end of a chain of ideal blocks."""
    estimate = None
    for block in range(TINY.parts):
        sigmas = block_sigmas(tiny_partition(), block, plan.levels)
        trajectory = Trajectory(TINY, plan, SIGMA_MAX, sigmas, is_last=block == TINY.parts - 1, estimate=estimate)
        while not trajectory.done:
            trajectory.supply(ideal(trajectory.piece()))
        estimate = trajectory.estimate
    return estimate


def error(levels: int, solver: Solver) -> float:
    """Largest distance from the ODE's exact solution, denoised once more at its end."""
    start = SIGMA_MAX * torch.stack([picture_noise(TINY, seed) for seed in (3, 4)])
    shrunk = ((DEVIATION**2 + SIGMA_MIN**2) / (DEVIATION**2 + SIGMA_MAX**2)) ** 0.5
    end = MEAN + (start - MEAN) * shrunk
    exact = (DEVIATION**2 * end + SIGMA_MIN**2 * MEAN) / (DEVIATION**2 + SIGMA_MIN**2)
    return float((drawn(DrawPlan(3, (0, 1), levels, solver)) - exact).abs().max())


def test_both_solvers_converge_to_the_exact_solution_and_2m_at_second_order() -> None:
    coarse, fine = error(48, "euler"), error(192, "euler")
    assert fine < 0.35 * coarse
    assert error(192, "2m") < 0.15 * error(48, "2m")
    assert error(192, "2m") < 0.1 * fine
    assert error(192, "2m") < 1e-3


def test_the_noise_and_the_estimate_are_the_state() -> None:
    plan, sigmas = DrawPlan(1, (0,), 5, "euler"), range_sigmas(SIGMA_MAX, SIGMA_MIN, 5)
    trajectory = Trajectory(TINY, plan, SIGMA_MAX, sigmas, is_last=True)
    z = SIGMA_MAX * picture_noise(TINY, 1)[None]
    for sigma, after in pairwise(sigmas):
        piece = trajectory.piece()
        assert torch.allclose(piece.x, in_scale(sigma) * z, atol=1e-5)
        f = ideal(piece)
        denoised = skip_scale(sigma) * z + out_scale(sigma) * f
        z = after / sigma * z + (1 - after / sigma) * denoised
        trajectory.supply(f)


@pytest.mark.parametrize("levels", [3, 4, 7, 12, 256])
def test_blocks_share_the_levels_and_meet_at_the_boundaries(levels: int) -> None:
    partition = tiny_partition()
    expected = block_levels(partition, levels)
    assert sum(expected) == levels
    assert min(expected) >= 1
    # within one of the steps that an undivided net makes there, but for blocks that would get none
    middles = range_sigmas(SIGMA_MAX, SIGMA_MIN, 2 * levels)[1::2]
    for steps, (high, low) in zip(expected, pairwise(partition.boundaries), strict=True):
        assert abs(steps - sum(low < middle <= high for middle in middles)) <= 1 or levels < 3 * TINY.parts
    sigmas = [block_sigmas(tiny_partition(), block, levels) for block in range(3)]
    assert [len(each) - 1 for each in sigmas] == expected
    assert [each[0] for each in sigmas] + [SIGMA_MIN] == [SIGMA_MAX] + [each[-1] for each in sigmas]
    assert all(high > low for each in sigmas for high, low in pairwise(each))


def test_a_trajectory_continues_at_any_level_from_its_state() -> None:
    plan, sigmas = DrawPlan(9, (0, 3), 6, "2m", 1.5), range_sigmas(SIGMA_MAX, SIGMA_MIN, 6)
    whole = Trajectory(TINY, plan, SIGMA_MAX, sigmas, is_last=True)
    estimate = before = None
    for level in range(7):
        one = Trajectory(TINY, plan, SIGMA_MAX, sigmas, is_last=True, estimate=estimate, at=level, before=before)
        for each in (whole, one):
            each.supply(each.piece().x * 0.3)
        estimate, before = one.estimate, one.before
    assert whole.done
    assert torch.equal(whole.pixels(), one.pixels())


def test_guidance_of_one_takes_one_evaluation_and_any_other_takes_two() -> None:
    sigmas = range_sigmas(SIGMA_MAX, SIGMA_MIN, 2)
    plain, guided = (
        Trajectory(TINY, DrawPlan(0, (1, 2), 2, guidance=guidance), SIGMA_MAX, sigmas, is_last=True)
        for guidance in (1.0, 3.0)
    )
    assert plain.piece().classes.tolist() == [1, 2]
    assert guided.piece().classes.tolist() == [1, 2, 3, 3], "the last two without a class"
    plain.supply(ideal(plain.piece()))
    guided.supply(ideal(guided.piece()))
    assert torch.allclose(plain.estimate, guided.estimate, atol=1e-6)  # class and none agree: there is nothing to guide
