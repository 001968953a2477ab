"""Filters, penalties and biases, against the library whose names the settings have."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stages.model.randomness import sample_tokens
from stages.model.scoring import PLAIN, Shaping

NONE = torch.zeros(1, 1, dtype=torch.int64)


def random_scores(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    "shaping",
    [
        Shaping(top_k=1),
        Shaping(top_k=40),
        Shaping(top_k=5000),
        Shaping(top_p=1e-9),
        Shaping(top_p=0.3),
        Shaping(top_p=0.95),
        Shaping(min_p=0.05),
        Shaping(min_p=1.0),
        Shaping(top_k=50, top_p=0.8, min_p=0.1),
        Shaping(top_k=7, top_p=0.999),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [256, 5000])
def test_filters_match_those_of_transformers(shaping: Shaping, vocabulary: int) -> None:
    filters = [TopKLogitsWarper(shaping.top_k)] if shaping.top_k else []
    filters += [TopPLogitsWarper(shaping.top_p)] if shaping.top_p < 1 else []
    filters += [MinPLogitsWarper(shaping.min_p)] if shaping.min_p else []
    scores = random_scores(30, vocabulary)
    expected = LogitsProcessorList(filters)(NONE, scores.clone())
    assert np.array_equal(shaping.filtered(scores.numpy()), expected.numpy())


def test_filters_keep_the_lower_of_equally_likely_tokens() -> None:
    scores = np.zeros((1, 9))
    scores[0, 4] = -1.0
    assert np.flatnonzero(np.isfinite(Shaping(top_k=6).filtered(scores)[0])).tolist() == [0, 1, 2, 3, 5, 6]
    assert np.flatnonzero(np.isfinite(Shaping(top_p=0.3).filtered(scores)[0])).tolist() == [0, 1, 2]


def test_a_row_is_filtered_independently_of_other_rows() -> None:
    scores, shaping = random_scores(6, 300).numpy(), Shaping(top_k=20, top_p=0.9)
    alone = np.concatenate([shaping.filtered(scores[i : i + 1]) for i in range(6)])
    assert np.array_equal(alone, shaping.filtered(scores))


def test_a_filter_changes_only_samples_that_it_excludes() -> None:
    logits, shaping = random_scores(200, 256), Shaping(top_k=8)
    plain, shaped = (sample_tokens(logits, 1.0, 5, 0, each) for each in (PLAIN, shaping))
    left = np.isfinite(shaping.filtered(logits.numpy()))
    assert plain != shaped
    assert all(left[row, token] for row, token in enumerate(shaped))
    assert all(one == other for row, (one, other) in enumerate(zip(plain, shaped, strict=True)) if left[row, one])
    assert sample_tokens(logits, 0.0, 5, 0, shaping) == sample_tokens(logits, 0.0, 5, 0)


# Penalties and biases


def test_the_repetition_penalty_matches_transformers() -> None:
    logits, known = random_scores(1, 300), np.array([5, 7, 7, 299, 0])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.from_numpy(known)[None], logits.clone())
    assert torch.equal(Shaping(repetition_penalty=1.3, prompt=2).adjusted(logits, known), expected)


def test_frequency_and_presence_penalties_count_written_tokens() -> None:
    logits, known = random_scores(1, 10), np.array([1, 2, 2, 2, 3, 3, 4])
    found = Shaping(frequency_penalty=0.5, presence_penalty=0.25, prompt=2).adjusted(logits, known) - logits
    assert found[0].tolist() == pytest.approx([0, 0, -1.25, -1.25, -0.75, 0, 0, 0, 0, 0])
    assert torch.equal(Shaping(presence_penalty=1, prompt=7).adjusted(logits, known), logits), "a prompt does not count"


def test_biases_are_applied_last() -> None:
    logits, known = random_scores(1, 10), np.array([1, 2, 3])
    shaping = Shaping(repetition_penalty=2.0, logit_bias={3: 100.0, int(logits.argmax()): -100.0})
    adjusted = shaping.adjusted(logits, known)
    assert sample_tokens(adjusted, 0.0, 0, 3) == sample_tokens(adjusted, 1.0, 0, 3) == bytes([3])
    plain = Shaping(repetition_penalty=2.0).adjusted(logits, known)
    assert adjusted[0, 3] == plain[0, 3] + 100
    assert Shaping().adjusted(logits, known) is logits
