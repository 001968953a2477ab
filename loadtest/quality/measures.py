"""Measures of a set of texts: words, entropies, novelty, and a classifier that tells them from human text."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from onesweep.loadtest.report.table import Estimate, percentiles, resampled

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


def words_of(text: str) -> list[str]:
    """Runs of letters, with apostrophes inside, in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def whole_words(prompt: bytes, output: bytes) -> list[str]:
    """The words of an output, without those that its two ends may have cut."""
    before, text = prompt.decode(errors="replace"), output.decode(errors="replace")
    found = list(_WORD.finditer(text))
    if found and found[0].start() == 0 and before and _WORD.fullmatch(before[-1]):
        found = found[1:]
    if found and found[-1].end() == len(text):
        found = found[:-1]
    return [match.group().lower() for match in found]


def distinct_pairs(words: Sequence[str]) -> float | None:
    """Share of neighbouring pairs of words that are different (Li et al. 2016, distinct-2); None without a pair."""
    pairs = list(pairwise(words))
    return len(set(pairs)) / len(pairs) if pairs else None


# Entropies stand beside every judge's figure, because a judge alone prefers text of low entropy.
GRAM = 4  # bytes: long enough to see repeated pieces, short enough to occur twice in human text
GROUPS = 20  # parts of which each is left out once to estimate a standard error

Counts = Counter[object]
T = TypeVar("T")


def symbol_counts(text: Sequence[int]) -> Counts:
    """Bytes, or tokens."""
    return Counter(text)


def gram_counts(text: Sequence[int]) -> Counts:
    """Runs of four; tokens come as a tuple."""
    return Counter(text[i : i + GRAM] for i in range(len(text) - GRAM + 1))


def word_counts(text: bytes) -> Counts:
    return Counter(words_of(text.decode(errors="replace")))


def pooled_entropy(texts: Sequence[T], counts: Callable[[T], Counts]) -> tuple[float, float] | None:
    """Entropy in bits of what `counts` finds in all texts together, and its standard error; None of nothing.

    The plug-in estimate: it grows with the number of texts, so compare equal numbers.
    """
    each = [counts(text) for text in texts]
    whole = sum_counts(each)
    if not whole:
        return None
    groups = [each[i::GROUPS] for i in range(min(GROUPS, len(each)))]
    if len(groups) < 2:
        return entropy_bits(whole), float("nan")
    # the jackknife over groups of texts: to draw texts twice, as a bootstrap does, would itself lower the entropy
    without = np.array([entropy_bits(_less(whole, sum_counts(group))) for group in groups])
    error = float(np.sqrt((len(groups) - 1) * np.mean((without - without.mean()) ** 2)))
    return entropy_bits(whole), error


def surprisals(texts: Sequence[bytes]) -> tuple[list[float], list[int]]:
    """-log2 of the share that each run of four bytes has in all texts, summed over a text's; and how many it has.

    Sum by sum it is the pooled entropy, and text by text its influence function: what a text more or less would do.
    """
    each = [gram_counts(text) for text in texts]
    whole = sum_counts(each)
    bits = {gram: math.log2(whole.total() / count) for gram, count in whole.items()}
    return [sum(n * bits[gram] for gram, n in counts.items()) for counts in each], [c.total() for c in each]


def entropy_bits(counts: Counts) -> float:
    if not counts:
        return 0.0
    shares: NDArray[np.float64] = np.fromiter(counts.values(), float)
    shares = shares / shares.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def sum_counts(parts: Iterable[Counts]) -> Counts:
    total: Counts = Counter()
    for part in parts:
        total.update(part)
    return total


def _less(whole: Counts, part: Counts) -> Counts:
    """`whole` without `part`, which it contains."""
    left = Counter(whole)
    left.subtract(part)
    return +left


SPAN = 32  # bytes, a power of two: shorter runs stand in any two texts by chance
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, with bits everywhere: 2^64 by the golden ratio


class TrainingText:
    """The words and spans of a text."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words_of(self.raw.decode(errors="replace")))

    @cached_property
    def _spans(self) -> NDArray[np.uint64]:
        return np.sort(_hashes(self.raw))

    def unseen_words(self, prompts: Sequence[bytes], outputs: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """For each output: words that are not in this text, and all words. Words that the ends may cut do not count."""
        each = [whole_words(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        return [sum(word not in self.words for word in words) for words in each], [len(words) for words in each]

    def copied_spans(self, outputs: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """For each output: runs of SPAN bytes that are in this text, and all runs. By 64-bit hashes."""
        each = [_hashes(output) for output in outputs]
        return [int(_is_in(spans, self._spans).sum()) for spans in each], [len(spans) for spans in each]


def _hashes(text: bytes) -> NDArray[np.uint64]:
    """A polynomial hash of every run of SPAN bytes, by doubling: H_2k(i) = H_k(i) B^k + H_k(i + k)."""
    hashes = np.frombuffer(text, np.uint8).astype(np.uint64) + np.uint64(1)
    length, power = 1, _FACTOR
    with np.errstate(over="ignore"):
        while length < SPAN:
            hashes = hashes[:-length] * power + hashes[length:]
            length, power = 2 * length, power * power
    return hashes


def _is_in(wanted: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    if not len(known):
        return np.zeros(len(wanted), bool)
    return known[np.minimum(np.searchsorted(known, wanted), len(known) - 1)] == wanted


FOLDS = 5  # a text is scored by a model that has not seen it
GRAMS = (1, 4)  # bytes, from and to
FEATURES = 1 << 18  # so many that two runs of four bytes rarely share one
RIDGE = 0.01  # texts have unit length: enough to keep the solution from following single texts


def classifier_auc(texts: Sequence[bytes], human: Sequence[bytes], seed: int) -> Estimate:
    """A linear classifier on hashed runs of one to four bytes, cross-validated; an interval over texts.

    Area under the ROC curve of the held-out scores, 1 when texts and human texts are told apart every time.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(
        analyzer="char", ngram_range=GRAMS, n_features=FEATURES, lowercase=False, alternate_sign=False
    )
    features = vectorizer.transform([text.decode("latin-1") for text in (*texts, *human)])
    alike: NDArray[np.float64] = (features @ features.T).toarray()
    labels = np.repeat([1.0, -1.0], [len(texts), len(human)])
    # both lists in the order of the source: a fold holds neighbours of both, so that a topic cannot tell a class
    folds = np.concatenate([np.arange(len(part)) * FOLDS // len(part) for part in (texts, human)])
    scores = np.zeros(len(labels))
    for fold in range(FOLDS):
        held_out = folds == fold
        known = labels[~held_out]
        # least squares with a ridge, solved between texts: of the strength of logistic regression, and exact at once
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
