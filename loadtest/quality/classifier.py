"""The two-sample test: how well a small classifier tells texts from human ones. AUC 0.5: it cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadtest.quality.intervals import Estimate, percentiles, resampled

FOLDS = 5
GRAMS = (1, 4)
FEATURES = 1 << 18
RIDGE = 0.01


def classifier_auc(texts: Sequence[bytes], human: Sequence[bytes], seed: int) -> Estimate:
    """A linear classifier on hashed runs of one to four bytes, cross-validated; an interval over texts.

    Least squares with a ridge, solved between texts: of the strength of logistic regression, and exact at once.
    Both lists in the order of the source: a fold holds neighbours of both, so that a topic cannot tell a class.
    Area under the ROC curve of the held-out scores, 1 when texts and human texts are told apart every time.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(
        analyzer="char", ngram_range=GRAMS, n_features=FEATURES, lowercase=False, alternate_sign=False
    )
    features = vectorizer.transform([text.decode("latin-1") for text in (*texts, *human)])
    alike: NDArray[np.float64] = (features @ features.T).toarray()
    labels = np.repeat([1.0, -1.0], [len(texts), len(human)])
    folds = np.concatenate([np.arange(len(part)) * FOLDS // len(part) for part in (texts, human)])
    scores = np.zeros(len(labels))
    for fold in range(FOLDS):
        held_out = folds == fold
        known = labels[~held_out]
        weights = np.linalg.solve(
            alike[np.ix_(~held_out, ~held_out)] + RIDGE * np.eye(len(known)), known - known.mean()
        )
        scores[held_out] = _ranks(alike[np.ix_(held_out, ~held_out)] @ weights)
    return _estimate(scores[labels > 0], scores[labels < 0], seed)


def auc(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """Probability that a positive scores above a negative, ties half (Mann and Whitney)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")
    return float(below.mean() / (2 * len(negative)))


def _ranks(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Within a fold, 0 to 1: scores of different models are not on one scale."""
    return np.searchsorted(np.sort(scores), scores, "left") / len(scores)


def _estimate(positive: NDArray[np.float64], negative: NDArray[np.float64], seed: int) -> Estimate:
    first, second = resampled(len(positive), seed), resampled(len(negative), seed + 1)
    values = [auc(positive[a], negative[b]) for a, b in zip(first, second, strict=True)]
    return Estimate(auc(positive, negative), *percentiles(np.array(values)))
