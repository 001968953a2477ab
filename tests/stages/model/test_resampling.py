"""Candidates: how their tokens are drawn, how they are weighed, and how far the draw is from the model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.backends.whole_model import BLOCK, draw_tokens
from stages.model.resampling import ImportanceWeights, draw, weigh
from tests.stages.statistics import probabilities


@given(st.integers(0, 1000), st.sampled_from([3, BLOCK, BLOCK + 1, 5 * BLOCK - 7]), st.floats(1e-16, 1.0))
def test_the_drawn_token_is_where_the_cumulative_sum_reaches_u(seed: int, size: int, u: float) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, seed % size] = -torch.inf
    tokens, probs = draw_tokens(logits, torch.full((4, 1), 1 / 0.8), torch.full((4, 1), u, dtype=torch.float64))
    exact = probabilities(logits, 0.8)
    below = exact.cumsum(axis=1)
    for row, (token, share) in enumerate(zip(tokens[:, 0].tolist(), probs[:, 0].tolist(), strict=True)):
        assert share == pytest.approx(exact[row, token], rel=1e-4)
        assert share > 0
        # float32 probs: within rounding of where float64 has it
        assert below[row, token] >= u - 1e-5
        assert below[row, token] - exact[row, token] <= u + 1e-5


@given(st.lists(st.floats(0, 5), min_size=1, max_size=20).filter(any), st.floats(1e-9, 1))
def test_a_drawn_token_has_a_positive_probability(probs: list[float], u: float) -> None:
    (index,) = draw(np.array([probs]), np.array([u]))
    assert probs[index] > 0


def test_draws_have_the_given_probabilities() -> None:
    probs = np.array([0.5, 0.0, 1.5])
    u = (np.arange(1000) + 1) / 1000
    drawn = draw(np.tile(probs, (1000, 1)), u)
    assert np.bincount(drawn, minlength=3).tolist() == [250, 0, 750]


def test_a_weight_is_p_over_q() -> None:
    weights = weigh(np.log([0.125, 0.25]), np.log([0.25, 0.125]), length=2)
    assert weights.shares == pytest.approx([0.2, 0.8])
    assert weights.effective == pytest.approx(1 / (0.04 + 0.64))
    assert weights.divergence_bits == pytest.approx(0.0), "a bit for one candidate, a bit less for the other"


@pytest.mark.parametrize("count", [2, 5, 16])
def test_the_distance_bound_holds(count: int) -> None:
    """For six texts: the law of the draw is nearer to p than the bound, and the weights estimate the bound."""
    rng = np.random.default_rng(count)
    q, p = rng.dirichlet(np.ones(6)), rng.dirichlet(np.full(6, 0.8))
    law, bounds, trials = np.zeros(6), [], 4_000
    for chosen in rng.choice(6, (trials, count), p=q):
        shares = (p / q)[chosen] / (p / q)[chosen].sum()
        np.add.at(law, chosen, shares / trials)
        bounds.append(ImportanceWeights(shares, 0.0).distance_bound)
    w = p / q
    exact = (p * np.maximum(w - 1, 0) / (w + count - 1)).sum()
    assert np.abs(law - p).sum() / 2 <= exact + 0.01, "the bound that the weights estimate is one"
    assert 0.5 * np.abs(law - p).sum() / 2 < np.mean(bounds)
