"""The panel: every figure of a set of continuations, beside human text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec

from loadtest.quality.classifier import classifier_auc
from loadtest.quality.entropy import gram_counts, pooled_entropy, symbol_counts, word_counts
from loadtest.quality.intervals import Estimate, around, difference_of_ratios, ratio_of_sums
from loadtest.quality.judge import INSTALL, Judge, Judgement, Progress
from loadtest.quality.mauve import mauve
from loadtest.quality.ngram import NgramModel
from loadtest.quality.novelty import TrainingText
from loadtest.quality.prompts import Passage
from loadtest.quality.row import GRAMS, JUDGED
from loadtest.quality.words import distinct_pairs, words_of
from stages.errors import InputError

MIN_TEXTS = 100
"""Fewer than this, on either side, are no sample to compare with."""


@dataclass
class Figures:
    """What was measured of one set of continuations, and why the rest was not."""

    values: dict[str, Estimate] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    bits: list[float] = field(default_factory=list)
    """The judge's, text by text."""
    sizes: list[int] = field(default_factory=list)
    """Bytes, text by text."""

    def put(self, name: str, estimate: Estimate | None, reason: str = "nothing to count") -> None:
        if estimate is None:
            self.reasons[name] = reason
        else:
            self.values[name] = estimate

    @contextlib.contextmanager
    def unless_refused(self, name: str) -> Iterator[None]:
        """What cannot be measured is a reason."""
        try:
            yield
        except InputError as error:
            self.reasons[name] = str(error)


class Panel:
    """Measures sets of continuations against the same human reference, with the same judges."""

    def __init__(
        self,
        reference: Sequence[Passage],
        judge: Judge,
        ngram: NgramModel | None,
        training: TrainingText | None,
        seed: int,
        progress: Progress,
        known_training: bool = True,
    ) -> None:
        """:param reference: human text that is compared with, and never asked for.
        :param training: what the models were trained on, or other text in its place; None where there is none.
        :param known_training: that it is what the models were trained on."""
        self.judge, self.ngram, self.training = judge, ngram, training
        self.seed, self.progress, self.known_training = seed, progress, known_training
        self.passages = reference
        self.reference = [passage.continuation for passage in reference]

    def measure(self, passages: Sequence[Passage], outputs: Sequence[bytes]) -> Figures:
        """:param outputs: one for each passage."""
        figures = Figures(sizes=[len(output) for output in outputs])
        judgement = self._judged(passages, outputs)
        figures.bits = judgement.bits
        figures.put(JUDGED, ratio_of_sums(figures.bits, figures.sizes, self.seed))
        self._put_second(figures, passages, outputs)
        self._put_variety(figures, outputs)
        self._put_novelty(figures, passages, outputs)
        self._put_auc(figures, outputs)
        self._put_mauve(figures, judgement)
        return figures

    def put_differences(self, figures: Figures, name: str, other: Figures | None) -> None:
        """Judge bits less those of others on the same prompts."""
        if other is not None and other is not figures:
            pairs = ((figures.bits, figures.sizes), (other.bits, other.sizes))
            figures.put(name, difference_of_ratios(*pairs, self.seed))

    def put_infill(self, figures: Figures, passages: Sequence[Passage], outputs: Sequence[bytes]) -> None:
        """What counts where the text after the gap is given."""
        joined = [output + passage.suffix for passage, output in zip(passages, outputs, strict=True)]
        bits = self._judged(passages, joined).bits
        figures.put("joined_bits_per_byte", ratio_of_sums(bits, [len(text) for text in joined], self.seed))
        same = [float(o == p.continuation) for p, o in zip(passages, outputs, strict=True)]
        figures.put("exact_match", ratio_of_sums(same, [1.0] * len(same), self.seed))

    def _judged(self, passages: Sequence[Passage], outputs: Sequence[bytes]) -> Judgement:
        if outputs is self.reference:
            return self._human
        return self.judge.judge([passage.prompt for passage in passages], outputs, self.progress)

    def _put_second(self, figures: Figures, passages: Sequence[Passage], outputs: Sequence[bytes]) -> None:
        name = "ngram_bits_per_byte"
        if self.ngram is None:
            figures.reasons[name] = "no training text to fit it to (--train)"
            return
        bits = self.ngram.bits([passage.prompt for passage in passages], outputs)
        figures.put(name, ratio_of_sums(bits, figures.sizes, self.seed))

    def _put_variety(self, figures: Figures, outputs: Sequence[bytes]) -> None:
        for name, counts in (("byte_entropy", symbol_counts), (GRAMS, gram_counts), ("word_entropy", word_counts)):
            pooled = pooled_entropy(outputs, counts)
            figures.put(name, around(*pooled) if pooled else None)
        shares = [distinct_pairs(words_of(output.decode(errors="replace"))) for output in outputs]
        known = [share for share in shares if share is not None]
        figures.put("distinct_2", ratio_of_sums(known, [1.0] * len(known), self.seed) if known else None)

    def _put_novelty(self, figures: Figures, passages: Sequence[Passage], outputs: Sequence[bytes]) -> None:
        prompts = [passage.prompt for passage in passages]
        if self.training is None:
            for name in ("unseen_words", "copied_spans"):
                figures.reasons[name] = "no training text (--train)"
            return
        figures.put("unseen_words", ratio_of_sums(*self.training.unseen_words(prompts, outputs), self.seed))
        if self.known_training:
            figures.put("copied_spans", ratio_of_sums(*self.training.copied_spans(outputs), self.seed))
        else:
            figures.reasons["copied_spans"] = "what the models were trained on is not known (--train)"

    def _put_auc(self, figures: Figures, outputs: Sequence[bytes]) -> None:
        with figures.unless_refused("auc"):
            self._check_sample(len(outputs))
            figures.put("auc", classifier_auc(outputs, self.reference, self.seed))

    def _put_mauve(self, figures: Figures, judgement: Judgement) -> None:
        with figures.unless_refused("mauve"):
            if judgement.features is None:
                raise InputError(f"judge {self.judge.name} has no hidden states")
            self._check_sample(len(judgement.bits))
            assert self._human.features is not None
            figures.put("mauve", Estimate(mauve(judgement.features, self._human.features, self.seed)))

    @cached_property
    def _human(self) -> Judgement:
        prompts = [passage.prompt for passage in self.passages]
        return self.judge.judge(prompts, self.reference, self.progress)

    def _check_sample(self, texts: int) -> None:
        """Raises InputError where there is too little to compare, or nothing to do it with."""
        if find_spec("sklearn") is None:
            raise InputError(f"scikit-learn is not installed: {INSTALL}")
        fewer = min(texts, len(self.reference))
        if fewer < MIN_TEXTS:
            raise InputError(f"{fewer} texts are too few, {MIN_TEXTS} are needed: a larger --count, or more text")
