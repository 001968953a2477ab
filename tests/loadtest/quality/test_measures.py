"""Entropies, words, copies, the two-sample test, MAUVE, intervals: cases whose answers are known."""

import math

import numpy as np
import pytest

from onesweep.loadtest.quality.measures import (
    SPAN,
    TrainingText,
    auc,
    classifier_auc,
    distinct_pairs,
    gram_counts,
    pooled_entropy,
    surprisals,
    symbol_counts,
    whole_words,
    word_counts,
    words_of,
)
from onesweep.loadtest.report.table import difference_of_ratios, ratio_of_sums

NUMBERS = np.random.default_rng(0)


def test_entropies_of_known_texts() -> None:
    assert pooled_entropy([b"abab", b"abab"], symbol_counts) == pytest.approx((1.0, 0.0))
    assert pooled_entropy([bytes(range(256))] * 2, symbol_counts) == pytest.approx((8.0, 0.0))
    assert pooled_entropy([b"aaaa", b"aaab"], gram_counts)[0] == pytest.approx(1.0)
    assert pooled_entropy([b"one two", b"One two"], word_counts)[0] == pytest.approx(1.0)
    assert pooled_entropy([b"123", b""], word_counts) is None
    texts = [b"to be or not to be", b"that is the question", b"be"]
    bits, grams = surprisals(texts)
    assert sum(bits) / sum(grams) == pytest.approx(pooled_entropy(texts, gram_counts)[0])
    assert grams == [15, 17, 0]


def test_the_error_of_an_entropy_is_that_of_drawing_other_texts() -> None:
    def draw() -> list[bytes]:
        return [bytes(NUMBERS.choice([97, 98, 99], 40, p=[0.7, 0.2, 0.1]).tolist()) for _ in range(60)]

    drawn = [pooled_entropy(draw(), symbol_counts) for _ in range(60)]
    spread = np.std([value for value, _ in drawn])
    assert np.mean([error for _, error in drawn]) == pytest.approx(spread, rel=0.4)


def test_words_are_runs_of_letters_and_cut_ones_do_not_count() -> None:
    assert words_of("Don't stop: naïve, 3 x_y!") == ["don't", "stop", "naïve", "x", "y"]
    assert whole_words(b"the old m", b"an looked at the s") == ["looked", "at", "the"]
    assert whole_words(b"the old ", b"man looked.") == ["man", "looked"]
    assert distinct_pairs(["a", "b", "a", "b", "a"]) == 0.5
    assert distinct_pairs(["a"]) is None


def test_unseen_words_and_copied_spans() -> None:
    training = TrainingText(b"The quick brown fox jumps over the lazy dog, and then it sleeps for an hour.")
    prompts = [b"x "] * 2
    assert training.unseen_words(prompts, [b"the quick blorp fox.", b"a dgo dog."]) == ([1, 2], [4, 3])
    copied = b"?" + training.raw[10 : 10 + SPAN + 1] + b"?"
    assert training.copied_spans([copied, b"short"]) == ([2, 0], [4, 0])


def test_auc_by_hand() -> None:
    assert auc(np.array([3.0, 4.0]), np.array([1.0, 2.0])) == 1.0
    assert auc(np.array([1.0, 1.0]), np.array([1.0])) == 0.5
    assert auc(np.array([0.0, 2.0]), np.array([1.0])) == 0.5


def test_the_classifier_tells_other_text_and_not_the_same() -> None:
    pytest.importorskip("sklearn", reason="the extra `judge` is not installed")
    numbers = np.random.default_rng(1)

    def texts(shares: list[float]) -> list[bytes]:
        return [bytes(numbers.choice([97, 98, 32], 60, p=shares).tolist()) for _ in range(120)]

    same = classifier_auc(texts([0.4, 0.4, 0.2]), texts([0.4, 0.4, 0.2]), 0)
    other = classifier_auc(texts([0.6, 0.2, 0.2]), texts([0.4, 0.4, 0.2]), 0)
    assert same.low < 0.5 < same.high
    assert other.value > 0.95
    assert other.low < other.value < other.high


def test_intervals_hold_what_they_should() -> None:
    held = 0
    for seed in range(60):
        estimate = ratio_of_sums(NUMBERS.normal(2, 1, 50), [1.0] * 50, seed)
        held += estimate.low <= 2 <= estimate.high
    assert held >= 50
    assert ratio_of_sums([1.0], [0.0], 0) is None


def test_paired_differences_are_narrower_than_their_terms() -> None:
    prompts = NUMBERS.normal(100, 30, 80)
    first, second = prompts + 5 + NUMBERS.normal(0, 1, 80), prompts
    sizes = [100.0] * 80
    difference = difference_of_ratios((first, sizes), (second, sizes), 0)
    alone = ratio_of_sums(first, sizes, 0)
    assert difference.value == pytest.approx(0.05, abs=0.005)
    assert difference.low > 0
    assert difference.high - difference.low < (alone.high - alone.low) / 5
    assert math.isfinite(difference.high)
