"""Verdicts on guesses, on an alphabet of a few letters: how far they stand, and what is drawn from p."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from onesweep.stages.model.speculation import (
    DRAW_SET_SIZES,
    MAX_DRAW_SET,
    Verification,
    draw_set,
    draw_set_size,
    verify_drafts,
)
from tests.stages.statistics import chi_square

LETTERS, SYMBOLS = 4, 256
P, Q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.1, 0.4])
TEMPERATURE = 0.7
TRIALS = 3_000


def logits_of(*rows: NDArray[np.float64]) -> Tensor:
    """Logits that are `rows` at TEMPERATURE."""
    logits = torch.full((len(rows), SYMBOLS), -1e9)
    for i, row in enumerate(rows):
        logits[i, :LETTERS] = torch.tensor(TEMPERATURE * np.log(np.maximum(row, 1e-300)))
    return logits


def judged(
    logits: Tensor, guesses: list[int], odds: NDArray[np.float64], seed: int = 0, position: int = 17
) -> Verification:
    return verify_drafts(logits, guesses, odds.astype(np.float32), TEMPERATURE, seed, position)


def test_guesses_are_accepted_as_often_as_they_should_be() -> None:
    rng, logits = np.random.default_rng(0), logits_of(P)
    accepted = np.zeros((2, LETTERS), dtype=np.int64)
    for seed in range(TRIALS):
        guess = int(rng.choice(LETTERS, p=Q))
        accepted[judged(logits, [guess], Q[[guess]], seed).accepted, guess] += 1
    guessed = accepted.sum(axis=0)
    share = accepted[1] / guessed
    assert np.abs(share - np.minimum(1, P / Q)).max() < 4 * (0.25 / guessed.min()) ** 0.5
    assert share.tolist()[:3] == [1.0, 1.0, 1.0]
    assert share[3] == 0.0
    assert abs(accepted[1].sum() / TRIALS - np.minimum(P, Q).sum()) < 4 * (0.25 / TRIALS) ** 0.5


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 2**64 - 1), st.integers(0, 500))
def test_a_verdict_ends_at_the_first_refusal_and_looks_at_nothing_after_it(guesses, seed: int, position: int) -> None:
    rows = [P if i % 2 else Q for i in range(len(guesses))]
    odds = np.array([[0.6, 0.5, 0.9, 0.3][guess] for guess in guesses])
    whole = judged(logits_of(*rows), guesses, odds, seed, position)
    if whole.accepted < len(guesses):
        assert set(whole.symbols) <= set(np.flatnonzero(rows[whole.accepted]))
        assert np.allclose(whole.odds, rows[whole.accepted][whole.symbols], atol=1e-6)
        logits = logits_of(*rows)
        logits[whole.accepted + 1 :] = torch.nan
        again = judged(logits, guesses, odds, seed, position)
        assert (again.accepted, again.symbols.tolist()) == (whole.accepted, whole.symbols.tolist())
    else:
        assert len(whole.symbols) == len(whole.odds) == 0
    for cut in range(1, len(guesses) + 1):
        part = judged(logits_of(*rows[:cut]), guesses[:cut], odds[:cut], seed, position)
        assert part.accepted == min(cut, whole.accepted)


def test_at_temperature_nought_the_most_likely_is_accepted_and_drawn() -> None:
    logits = torch.randn(4, SYMBOLS, generator=torch.Generator().manual_seed(1))
    best, odds = logits.argmax(dim=1).tolist(), np.ones(4, dtype=np.float32)
    assert verify_drafts(logits, best, odds, 0.0, 1, 0).accepted == 4
    verdict = verify_drafts(logits, [*best[:2], best[2] ^ 1, best[3]], odds, 0.0, 1, 0)
    assert verdict.accepted == 2
    assert set(verdict.symbols) == {best[2]}
    assert set(verdict.odds) == {1.0}


def test_odds_that_are_hardly_there_are_no_obstacle() -> None:
    least = np.full(1, 1e-45, dtype=np.float32)
    assert verify_drafts(logits_of(P), [0], least, TEMPERATURE, 0, 0).accepted == 1
    far = torch.zeros(1, SYMBOLS)
    far[0, 1] = 1e4
    assert verify_drafts(far, [0], least, TEMPERATURE, 0, 0).accepted == 0


def test_what_is_no_number_lets_no_guess_stand() -> None:
    verdict = judged(torch.full((2, SYMBOLS), torch.nan), [1, 2], np.array([0.5, 0.5]))
    assert verdict.accepted == 0
    assert np.isnan(verdict.odds).all()


# Sets of draws
@pytest.mark.parametrize("size", [70, 300, 1030])
def test_draws_have_the_odds_whatever_the_vocabulary(size: int) -> None:
    """The last block of a vocabulary may be a short one, and some symbols are impossible."""
    p = np.random.default_rng(size).dirichlet(np.full(size, 0.3))
    p[::3] = 0.0
    p /= p.sum()
    counts = np.zeros(size, dtype=np.int64)
    for seed in range(150):
        symbols, odds = draw_set(p, seed, 9, 1)
        assert len(symbols) == DRAW_SET_SIZES[0]
        assert odds.tolist() == p[symbols].tolist()
        counts += np.bincount(symbols, minlength=size)
    total = counts.sum()
    likely = p * total >= 5
    assert counts[p == 0].sum() == 0
    merged = np.append(counts[likely], counts[~likely].sum()), np.append(p[likely], p[~likely].sum()) * total
    assert chi_square(*merged) > 1e-3


def test_sets_get_larger_until_they_are_all_symbols() -> None:
    assert [draw_set_size(number, 49_152) for number in range(1, MAX_DRAW_SET + 1)] == [*DRAW_SET_SIZES, 49_152]
    assert [draw_set_size(number, SYMBOLS) for number in range(1, MAX_DRAW_SET + 1)] == [64, SYMBOLS, SYMBOLS]
    p = np.random.default_rng(0).dirichlet(np.ones(2000))
    first, second, last = (draw_set(p, 3, 9, number)[0] for number in (1, 2, 3))
    assert first.tolist() != second[:64].tolist(), "each has numbers of its own"
    assert last.tolist() == list(range(2000))
    assert draw_set(p, 3, 10, 1)[0].tolist() != first.tolist()
    assert draw_set(p, 4, 9, 1)[0].tolist() != first.tolist()


def test_rounding_leaves_draws_as_they_are() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(5000, 0.1))
    rounded = p * (1 + 1e-6 * np.random.default_rng(1).uniform(-1, 1, size=len(p)))
    for seed in range(20):
        assert draw_set(p, seed, 0, 1)[0].tolist() == draw_set(rounded / rounded.sum(), seed, 0, 1)[0].tolist()
