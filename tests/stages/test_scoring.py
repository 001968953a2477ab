"""Scores and verdicts: what they say about given bytes is what the model's probabilities say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from stages.randomness import sample_symbols
from stages.scoring import (
    BRANCH_ROWS,
    IMPOSSIBLE_NATS,
    MAX_SCORED_ROWS,
    CandidateScores,
    branch_pieces,
    judge,
    log_probabilities,
)

temperatures = st.sampled_from([0.05, 0.8, 1.0, 3.0])


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))


@given(rows=st.integers(1, 5), seed=st.integers(0, 99), temperature=temperatures)
def test_they_are_the_log_softmax(rows: int, seed: int, temperature: float) -> None:
    logits = random_logits(rows, seed)
    expected = (logits.double() / temperature).log_softmax(-1).numpy()
    assert np.allclose(log_probabilities(logits, temperature), expected, atol=1e-9)


def test_at_temperature_nought_the_most_likely_byte_is_certain() -> None:
    logits = random_logits(7)
    logits[3, 5] = logits[3].max()
    nats = log_probabilities(logits, 0.0)
    assert bytes(nats.argmax(axis=1).astype(np.uint8)) == sample_symbols(logits, 0.0, 0, 0)
    assert sorted(set(nats.flatten())) == [IMPOSSIBLE_NATS, 0.0]
    assert (np.count_nonzero(nats == 0.0, axis=1) == 1).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 5e-324, 1e-3, 100.0])
def test_every_number_is_finite_and_so_is_a_sum_in_float32(temperature: float) -> None:
    for scale in (1e-3, 30.0, 1e30):
        nats = log_probabilities(random_logits(4, scale=scale), temperature).astype(np.float32)
        assert np.isfinite(nats).all()
        assert (nats <= 0).all()
        assert np.isfinite(np.full(MAX_SCORED_ROWS, nats.min()).sum(dtype=np.float32))


@given(st.integers(0, 9), st.integers(0, 300))
def test_pieces_are_whole_branches(branches: int, positions: int) -> None:
    source = torch.arange(branches * positions).view(branches, positions)
    pieces = branch_pieces(source)
    assert torch.equal(torch.cat([*pieces, source[:0]]), source if positions else source[:0])
    assert all(piece.numel() <= max(BRANCH_ROWS, positions) for piece in pieces)
    assert all(piece.numel() > BRANCH_ROWS - positions for piece in pieces[:-1])


@given(branches=st.integers(1, 6), length=st.integers(1, 7), sizes=st.integers(1, 50), temperature=temperatures)
def test_each_byte_of_a_candidate_gets_its_own_row(branches: int, length: int, sizes: int, temperature: float) -> None:
    rows = 1 + branches * (length - 1)
    logits = random_logits(rows, branches)
    candidates = torch.randint(256, (branches, length), generator=torch.Generator().manual_seed(length))
    expected = np.empty((branches, length))
    for m, candidate in enumerate(candidates.tolist()):
        for i, byte in enumerate(candidate):
            row = 0 if i == 0 else 1 + m * (length - 1) + i - 1
            expected[m, i] = log_probabilities(logits[row : row + 1], temperature)[0, byte]
    scores = CandidateScores(candidates, temperature)
    for piece in logits.split(sizes):
        scores.add(piece)
    found = scores.nats()
    assert found.dtype == np.float32
    assert np.allclose(found, expected, rtol=1e-6)


# Verdicts, on an alphabet of four letters

LETTERS = 4
P, Q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.1, 0.4])
TEMPERATURE = 0.7
DRAWS = 5_000


def logits_of(*rows: NDArray[np.float64]) -> Tensor:
    """Logits that are `rows` at TEMPERATURE."""
    logits = torch.full((len(rows), 256), -1e9)
    for i, row in enumerate(rows):
        logits[i, :LETTERS] = torch.tensor(TEMPERATURE * np.log(np.maximum(row, 1e-300)))
    return logits


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """The probability of counts that are at least as far off."""
    live = expected > 0
    assert counts[~live].sum() == 0
    statistic = ((counts[live] - expected[live]) ** 2 / expected[live]).sum()
    return float(torch.special.gammaincc(torch.tensor((live.sum() - 1) / 2), torch.tensor(statistic / 2)))


def test_guesses_are_accepted_as_often_as_they_should_be_and_the_outcome_is_p() -> None:
    rng, logits = np.random.default_rng(0), logits_of(P, Q)
    accepted, outcomes = np.zeros((2, LETTERS), dtype=np.int64), np.zeros(LETTERS, dtype=np.int64)
    rest = np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum()
    for seed in range(DRAWS):
        guess = rng.choice(LETTERS, p=Q)
        verdict = judge(logits, bytes([guess]), Q[[guess]].astype(np.float32), TEMPERATURE, seed, 17)
        accepted[verdict.accepted, guess] += 1
        outcomes[guess if verdict.accepted else rng.choice(LETTERS, p=rest)] += 1
    guessed = accepted.sum(axis=0)
    share = accepted[1] / guessed
    assert np.abs(share - np.minimum(1, P / Q)).max() < 4 * (0.25 / guessed.min()) ** 0.5
    assert share[0] == share[1] == share[2] == 1.0
    assert share[3] == 0.0
    assert abs(accepted[1].sum() / DRAWS - np.minimum(P, Q).sum()) < 4 * (0.25 / DRAWS) ** 0.5
    assert chi_square(outcomes, P * DRAWS) > 1e-3


def test_a_guess_between_is_accepted_with_the_ratio() -> None:
    p, q = np.array([0.3, 0.7, 0.0, 0.0]), np.array([0.6, 0.4, 0.0, 0.0])
    verdicts = [
        judge(logits_of(p, q), b"\x00", q[:1].astype(np.float32), TEMPERATURE, seed, 4).accepted
        for seed in range(DRAWS)
    ]
    assert abs(np.mean(verdicts) - 0.5) < 4 * (0.25 / DRAWS) ** 0.5


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=0, max_size=9), st.integers(0, 2**64 - 1), st.integers(0, 500))
def test_a_verdict_ends_at_the_first_refusal_and_depends_on_no_guess_after_it(
    guesses: list[int], seed: int, position: int
) -> None:
    rows = [P if i % 2 else Q for i in range(len(guesses) + 1)]
    odds = np.array([[0.6, 0.5, 0.9, 0.3][guess] for guess in guesses], dtype=np.float32)
    whole = judge(logits_of(*rows), bytes(guesses), odds, TEMPERATURE, seed, position)
    assert np.allclose(whole.probabilities[:LETTERS], rows[whole.accepted], atol=1e-6)
    for cut in range(len(guesses) + 1):
        part = judge(logits_of(*rows[: cut + 1]), bytes(guesses[:cut]), odds[:cut], TEMPERATURE, seed, position)
        assert part.accepted == min(cut, whole.accepted)


def test_at_temperature_nought_the_most_likely_bytes_are_accepted() -> None:
    logits = random_logits(5)
    best = bytes(logits.argmax(dim=1).tolist())
    odds = np.ones(4, dtype=np.float32)
    assert judge(logits, best[:4], odds, 0.0, 1, 0).accepted == 4
    verdict = judge(logits, best[:2] + bytes([best[2] ^ 1]) + best[3:4], odds, 0.0, 1, 0)
    assert verdict.accepted == 2
    assert verdict.probabilities.tolist() == [float(i == best[2]) for i in range(256)]


def test_odds_that_are_hardly_there_are_no_obstacle() -> None:
    least = np.full(1, 1e-45, dtype=np.float32)
    assert judge(logits_of(P, Q), b"\x00", least, TEMPERATURE, 0, 0).accepted == 1
    assert judge(random_logits(2, scale=1e4), b"\x00", least, TEMPERATURE, 0, 0).accepted == 0
