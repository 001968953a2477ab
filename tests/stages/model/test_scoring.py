"""Scores of given bytes are the model's log-probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.model.randomness import sample_tokens
from stages.model.scoring import (
    BRANCH_ROWS,
    IMPOSSIBLE_NATS,
    MAX_SCORED_ROWS,
    CandidateScores,
    branch_pieces,
    log_probabilities,
)

temperatures = st.sampled_from([0.05, 0.8, 1.0, 3.0])


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))


@given(rows=st.integers(1, 5), seed=st.integers(0, 99), temperature=temperatures)
def test_scores_are_the_log_softmax(rows: int, seed: int, temperature: float) -> None:
    logits = random_logits(rows, seed)
    expected = (logits.double() / temperature).log_softmax(-1).numpy()
    assert np.allclose(log_probabilities(logits, temperature), expected, atol=1e-9)


def test_at_temperature_zero_the_most_likely_byte_has_probability_one() -> None:
    logits = random_logits(7)
    logits[3, 5] = logits[3].max()
    nats = log_probabilities(logits, 0.0)
    assert bytes(nats.argmax(axis=1).astype(np.uint8)) == sample_tokens(logits, 0.0, 0, 0)
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
    assert np.allclose(scores.nats(), expected.sum(axis=1), rtol=1e-12)
