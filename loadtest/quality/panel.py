"""The panel: every figure of a set of continuations, beside human text, as a row of the table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, Self

from onesweep.loadtest.quality.judge import INSTALL, Judge, Judgement, NgramModel, Progress
from onesweep.loadtest.quality.measures import (
    TrainingText,
    classifier_auc,
    distinct_pairs,
    gram_counts,
    mauve,
    pooled_entropy,
    symbol_counts,
    word_counts,
    words_of,
)
from onesweep.loadtest.quality.prompts import Passage, PromptSet
from onesweep.loadtest.report.table import Estimate, around, difference_of_ratios, flat, ratio_of_sums
from onesweep.stages.errors import InputError

HUMAN = "human"
JUDGED = "judge_bits_per_byte"
GRAMS = "gram_entropy"
AT_HUMAN_ENTROPY = "judge_bits_at_human_entropy"  # a fair figure: nobody can buy it with monotony


class Figure(NamedTuple):
    """A figure of the panel as tables show it."""

    title: str
    digits: int
    meaning: str


# The figures that a verdict looks at.
PANEL = {
    JUDGED: Figure("judge bits", 3, "bits that the judge needs for a byte of the text, given the prompt"),
    "ngram_bits_per_byte": Figure("n-gram bits", 3, "the same of an n-gram model fitted to the training text"),
    "byte_entropy": Figure(
        "byte ent", 2, "bits of the bytes of all texts together: low where few different bytes are used"
    ),
    GRAMS: Figure("4-gram ent", 2, "bits of all runs of four bytes: low where the same pieces come again"),
    "word_entropy": Figure("word ent", 2, "bits of all words: low where few words are used"),
    "distinct_2": Figure(
        "distinct-2", 3, "share of a text's pairs of words that are different: low where a text repeats itself"
    ),
    "auc": Figure("auc", 3, "how well a classifier tells the texts from human ones: 0.5 not at all, 1 always"),
    "mauve": Figure("mauve", 3, "overlap with human text as the judge's hidden states see it: 1 the same, 0 none"),
    "unseen_words": Figure("unseen", 3, "share of words that the training text does not have: spelling"),
    "copied_spans": Figure("copied", 3, "share of 32-byte spans that stand in the training text: copying"),
}

DERIVED = {
    "judge_minus_human": Figure("- human", 3, "judge bits less those of the true continuations, prompt by prompt"),
    "judge_minus_local": Figure("- local", 3, "judge bits less those of mode `local`, prompt by prompt"),
    AT_HUMAN_ENTROPY: Figure(
        "at human entropy",
        3,
        "judge bits where the 4-gram entropy is the human one, between the temperatures around it",
    ),
    "joined_bits_per_byte": Figure(
        "joined bits", 3, "judge bits of the text and the true text after it: low where the one leads to the other"
    ),
    "exact_match": Figure("exact", 3, "share of texts that are the true continuation"),
}
FIGURES = PANEL | DERIVED


@dataclass(frozen=True)
class QualityRow:
    """Figures of one arm. None where a figure has no meaning; `reasons` says why."""

    mode: str  # `human` for the true continuations
    scorer: str | None = None
    chunk: int | None = None
    candidates: int | None = None
    temperature: float | None = None
    steps: int | None = None  # Euler steps in each block, where the spec names them
    spec: str = ""  # of this arm on the command line
    sweeps: float | None = None  # mean over texts; likewise those below, unless they say otherwise
    n: int = 0
    seconds: float | None = None  # median latency of a text, while others are generated beside it
    host_seconds: float | None = None  # arithmetic of the hosts for a text
    compute_seconds: float | None = None  # the same with the router's: its drafter works there
    wire_bytes: float | None = None
    acceptance: float | None = None
    effective_samples: float | None = None
    divergence_bits: float | None = None
    figures: dict[str, Estimate] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.spec or self.mode

    def figure(self, name: str) -> float | None:
        return self.figures[name].value if name in self.figures else None

    def to_record(self) -> dict[str, Any]:
        """Flat: each figure under its name, its interval under NAME_low and NAME_high."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "figures"}
        return {**record, **flat(self.figures, FIGURES)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """The row that `to_record` wrote; keys that it does not know are left out."""
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        figures = {
            name: Estimate(record[name], record.get(f"{name}_low"), record.get(f"{name}_high"))
            for name in FIGURES
            if record.get(name) is not None
        }
        return cls(**{**known, "figures": figures})


def at_human_entropy(rows: Sequence[QualityRow], human: QualityRow) -> list[QualityRow]:
    """The rows with AT_HUMAN_ENTROPY, the same for rows that differ in temperature only.

    Linear in the 4-gram entropy between two neighbouring temperatures, and so are the ends of its interval. None where
    no two temperatures of an arm have the human entropy between them.
    """
    completed = []
    for row in rows:
        if row.mode == HUMAN:
            completed.append(row)
            continue
        alike = [o for o in rows if o.mode != HUMAN and _without_temperature(o) == _without_temperature(row)]
        estimate, reason = _between(sorted(alike, key=lambda other: other.temperature or 0.0), human)
        if estimate is None:
            completed.append(replace(row, reasons=row.reasons | {AT_HUMAN_ENTROPY: reason}))
        else:
            completed.append(replace(row, figures=row.figures | {AT_HUMAN_ENTROPY: estimate}))
    return completed


def _without_temperature(row: QualityRow) -> str:
    return ":".join(part for part in row.spec.split(":") if not part.startswith("temperature="))


def _between(arm: Sequence[QualityRow], human: QualityRow) -> tuple[Estimate | None, str]:
    wanted = human.figure(GRAMS)
    if wanted is None:
        return None, "the human text has no 4-gram entropy"
    if len(arm) < 2:
        return None, "one temperature only (--temperatures)"
    for colder, warmer in pairwise(arm):
        low, high = colder.figure(GRAMS), warmer.figure(GRAMS)
        if low is None or high is None or not min(low, high) <= wanted <= max(low, high):
            continue
        share = (wanted - low) / (high - low) if high != low else 0.0
        return _mixed(colder.figures[JUDGED], warmer.figures[JUDGED], share), ""
    return None, f"no two temperatures have the human 4-gram entropy, {wanted:.2f} bits, between them"


def _mixed(first: Estimate, second: Estimate, share: float) -> Estimate:
    def between(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + share * (b - a)

    value = first.value + share * (second.value - first.value)
    return Estimate(value, between(first.low, second.low), between(first.high, second.high))


_PERFECT = {"auc": 0.5, "mauve": 1.0}  # of text that nothing tells from human text; of other figures the reference's
_SAME = 1e-9  # rounding is no difference


@dataclass(frozen=True)
class Comparison:
    """The figures in which one row is nearer to human text than another, and those where it is farther."""

    nearer: tuple[str, ...]
    farther: tuple[str, ...]

    @property
    def wins(self) -> bool:
        """On the panel as a whole: nearer in most of the figures that tell the two apart."""
        return len(self.nearer) > len(self.farther)


def verdict(row: QualityRow, rival: QualityRow, reference: QualityRow) -> Comparison:
    """:param reference: human text other than either's. A figure that one of the three does not have is left out."""
    nearer: list[str] = []
    farther: list[str] = []
    for name in PANEL:
        own, others = row.figure(name), rival.figure(name)
        perfect = _PERFECT.get(name, reference.figure(name))
        if own is None or others is None or perfect is None:
            continue
        # every figure counts the same, by its distance from the reference: a judge alone prefers a phrase without end,
        # but text that is likelier than human text is as far from it as text that is less likely
        difference = abs(own - perfect) - abs(others - perfect)
        if abs(difference) > _SAME:
            (nearer if difference < 0 else farther).append(name)
    return Comparison(tuple(nearer), tuple(farther))


MIN_TEXTS = 100  # fewer than this, on either side, are no sample to compare with


@dataclass
class TextFigures:
    """Figures of one set of continuations, and the reasons for those that are missing."""

    values: dict[str, Estimate] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    bits: list[float] = field(default_factory=list)  # the judge's, text by text
    sizes: list[int] = field(default_factory=list)  # bytes, text by text

    def put(self, name: str, estimate: Estimate | None, reason: str = "nothing to count") -> None:
        if estimate is None:
            self.reasons[name] = reason
        else:
            self.values[name] = estimate

    @contextlib.contextmanager
    def unless_refused(self, name: str) -> Iterator[None]:
        """Record the InputError of a figure that cannot be measured as its reason."""
        try:
            yield
        except InputError as error:
            self.reasons[name] = str(error)


@dataclass(frozen=True)
class JudgedText:
    """The prompts of a run, and what their continuations are judged by."""

    prompts: PromptSet
    judge: Judge
    ngram: NgramModel | None
    training: TrainingText | None  # the models' own, or other text in its place; None where there is none
    known_training: bool  # False where `training` is other text

    @property
    def source(self) -> str:
        return "training text" if self.known_training else "text between the prompts, for want of training text"


class QualityPanel:
    """Measures sets of continuations against the same human reference, with the same judges."""

    def __init__(self, judged: JudgedText, seed: int, progress: Progress) -> None:
        self.by, self.seed, self.progress = judged, seed, progress
        self.reference = [passage.continuation for passage in judged.prompts.reference]

    def measure(self, passages: Sequence[Passage], outputs: Sequence[bytes]) -> TextFigures:
        """:param outputs: one for each passage."""
        figures = TextFigures(sizes=[len(output) for output in outputs])
        judgement = self._judged(passages, outputs)
        figures.bits = judgement.bits
        figures.put(JUDGED, ratio_of_sums(figures.bits, figures.sizes, self.seed))
        self._put_second(figures, passages, outputs)
        self._put_variety(figures, outputs)
        self._put_novelty(figures, passages, outputs)
        with figures.unless_refused("auc"):
            self._check_sample(len(outputs))
            figures.put("auc", classifier_auc(outputs, self.reference, self.seed))
        with figures.unless_refused("mauve"):
            if judgement.features is None:
                raise InputError(f"judge {self.by.judge.name} has no hidden states")
            self._check_sample(len(outputs))
            assert self._human.features is not None
            figures.put("mauve", Estimate(mauve(judgement.features, self._human.features, self.seed)))
        return figures

    def put_differences(self, figures: TextFigures, name: str, other: TextFigures | None) -> None:
        """Judge bits less those of others on the same prompts."""
        if other is not None and other is not figures:
            pairs = ((figures.bits, figures.sizes), (other.bits, other.sizes))
            figures.put(name, difference_of_ratios(*pairs, self.seed))

    def put_infill(self, figures: TextFigures, passages: Sequence[Passage], outputs: Sequence[bytes]) -> None:
        """Add the figures of a gap: bits of filling and suffix together, and exact matches."""
        joined = [output + passage.suffix for passage, output in zip(passages, outputs, strict=True)]
        bits = self._judged(passages, joined).bits
        figures.put("joined_bits_per_byte", ratio_of_sums(bits, [len(text) for text in joined], self.seed))
        same = [float(o == p.continuation) for p, o in zip(passages, outputs, strict=True)]
        figures.put("exact_match", ratio_of_sums(same, [1.0] * len(same), self.seed))

    def _judged(self, passages: Sequence[Passage], outputs: Sequence[bytes]) -> Judgement:
        if outputs is self.reference:
            return self._human
        return self.by.judge.judge([passage.prompt for passage in passages], outputs, self.progress)

    def _put_second(self, figures: TextFigures, passages: Sequence[Passage], outputs: Sequence[bytes]) -> None:
        name = "ngram_bits_per_byte"
        if self.by.ngram is None:
            figures.reasons[name] = "no training text to fit it to (--train)"
            return
        bits = self.by.ngram.bits([passage.prompt for passage in passages], outputs)
        figures.put(name, ratio_of_sums(bits, figures.sizes, self.seed))

    def _put_variety(self, figures: TextFigures, outputs: Sequence[bytes]) -> None:
        for name, counts in (("byte_entropy", symbol_counts), (GRAMS, gram_counts), ("word_entropy", word_counts)):
            pooled = pooled_entropy(outputs, counts)
            figures.put(name, around(*pooled) if pooled else None)
        shares = [distinct_pairs(words_of(output.decode(errors="replace"))) for output in outputs]
        known = [share for share in shares if share is not None]
        figures.put("distinct_2", ratio_of_sums(known, [1.0] * len(known), self.seed) if known else None)

    def _put_novelty(self, figures: TextFigures, passages: Sequence[Passage], outputs: Sequence[bytes]) -> None:
        prompts = [passage.prompt for passage in passages]
        if self.by.training is None:
            for name in ("unseen_words", "copied_spans"):
                figures.reasons[name] = "no training text (--train)"
            return
        figures.put("unseen_words", ratio_of_sums(*self.by.training.unseen_words(prompts, outputs), self.seed))
        if self.by.known_training:
            figures.put("copied_spans", ratio_of_sums(*self.by.training.copied_spans(outputs), self.seed))
        else:
            figures.reasons["copied_spans"] = "what the models were trained on is not known (--train)"

    @cached_property
    def _human(self) -> Judgement:
        prompts = [passage.prompt for passage in self.by.prompts.reference]
        return self.by.judge.judge(prompts, self.reference, self.progress)

    def _check_sample(self, texts: int) -> None:
        """Raises InputError where there is too little to compare, or nothing to do it with."""
        if find_spec("sklearn") is None:
            raise InputError(f"scikit-learn is not installed: {INSTALL}")
        fewer = min(texts, len(self.reference))
        if fewer < MIN_TEXTS:
            raise InputError(f"{fewer} texts are too few, {MIN_TEXTS} are needed: a larger --count, or more text")
