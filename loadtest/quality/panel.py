"""The panel: every figure of a set of continuations, beside human text, as a row of the table."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from onesweep.loadtest.quality.judge import INSTALL, Judge, NgramModel, Progress
from onesweep.loadtest.quality.measures import (
    TrainingText,
    classifier_auc,
    distinct_pairs,
    gram_counts,
    pooled_entropy,
    surprisals,
    symbol_counts,
    word_counts,
    words_of,
)
from onesweep.loadtest.quality.prompts import Passage, PromptSet
from onesweep.loadtest.report.table import (
    Estimate,
    around,
    difference_of_ratios,
    flat,
    percentiles,
    ratio_of_sums,
    resampled,
)
from onesweep.stages.errors import InputError

HUMAN = "human"
JUDGED = "judge_bits_per_byte"
GRAMS = "gram_entropy"
# Fair figures: nobody can buy them with monotony.
AT_HUMAN_ENTROPY = "judge_bits_at_human_entropy"
AT_AR_ENTROPY = "judge_bits_at_ar_entropy"
GAP_SHARE = "gap_share"


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
    AT_AR_ENTROPY: Figure("at ar's entropy", 3, "the same where the 4-gram entropy is that of `ar` in the same run"),
    GAP_SHARE: Figure(
        "gap share", 2, "share of the judge bits from `local` to `ar` that is closed, all three at the entropy of `ar`"
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


class Resampled(NamedTuple):
    """Judge bits a byte and 4-gram entropy of a set of texts, of all of them and then of each bootstrap draw."""

    bits: NDArray[np.float64]
    entropy: NDArray[np.float64]


def bits_at(arm: Sequence[Resampled], entropy: NDArray[np.float64]) -> NDArray[np.float64] | str:
    """Judge bits of an arm where its texts have this 4-gram entropy, draw by draw; or why that is not known.

    :param arm: its texts at two temperatures or more, from cold to warm. Linear between the two around the entropy.
    """
    if len(arm) < 2:
        return "one temperature only (--temperatures)"
    for colder, warmer in pairwise(arm):
        low, high = sorted((colder.entropy[0], warmer.entropy[0]))
        if low <= entropy[0] <= high and low < high:
            # a draw keeps to the pair that all prompts choose, even where its own entropy lies a little outside
            share = (entropy - colder.entropy) / (warmer.entropy - colder.entropy)
            return np.asarray(colder.bits + share * (warmer.bits - colder.bits))
    return f"no two temperatures have the 4-gram entropy {entropy[0]:.2f} between them"


_PERFECT = {"auc": 0.5}  # of text that nothing tells from human text; of other figures the reference's
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
    surprisals: list[float] = field(default_factory=list)  # of the text's runs of four bytes, among those of all texts
    grams: list[int] = field(default_factory=list)  # how many they are

    def put(self, name: str, estimate: Estimate | None, reason: str = "nothing to count") -> None:
        if estimate is None:
            self.reasons[name] = reason
        else:
            self.values[name] = estimate

    def resampled(self, seed: int) -> Resampled:
        """Drawn by prompts, alike for all sets of a run: what is compared is paired."""
        rows = np.concatenate([np.arange(len(self.bits))[None], resampled(len(self.bits), seed)])
        # the entropy is linear in the prompts' weights here (its influence function): a draw that holds a prompt twice
        # would have less of it, whatever the text is worth
        pairs = ((self.bits, self.sizes), (self.surprisals, self.grams))
        with np.errstate(invalid="ignore"):  # texts without a byte have neither
            return Resampled(*(np.asarray(a, float)[rows].sum(1) / np.asarray(b, float)[rows].sum(1) for a, b in pairs))

    def put_draws(self, name: str, draws: NDArray[np.float64] | str) -> None:
        """A figure from its value and its draws, or the reason why there is none."""
        if isinstance(draws, str):
            self.reasons[name] = draws
        else:
            self.values[name] = Estimate(float(draws[0]), *percentiles(draws[1:]))

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
        figures.bits = self._judged(passages, outputs)
        figures.surprisals, figures.grams = surprisals(outputs)
        figures.put(JUDGED, ratio_of_sums(figures.bits, figures.sizes, self.seed))
        self._put_second(figures, passages, outputs)
        self._put_variety(figures, outputs)
        self._put_novelty(figures, passages, outputs)
        with figures.unless_refused("auc"):
            self._check_sample(len(outputs))
            figures.put("auc", classifier_auc(outputs, self.reference, self.seed))
        return figures

    def put_differences(self, figures: TextFigures, name: str, other: TextFigures | None) -> None:
        """Judge bits less those of others on the same prompts."""
        if other is not None and other is not figures:
            pairs = ((figures.bits, figures.sizes), (other.bits, other.sizes))
            figures.put(name, difference_of_ratios(*pairs, self.seed))

    def put_infill(self, figures: TextFigures, passages: Sequence[Passage], outputs: Sequence[bytes]) -> None:
        """Add the figures of a gap: bits of filling and suffix together, and exact matches."""
        joined = [output + passage.suffix for passage, output in zip(passages, outputs, strict=True)]
        bits = self._judged(passages, joined)
        figures.put("joined_bits_per_byte", ratio_of_sums(bits, [len(text) for text in joined], self.seed))
        same = [float(o == p.continuation) for p, o in zip(passages, outputs, strict=True)]
        figures.put("exact_match", ratio_of_sums(same, [1.0] * len(same), self.seed))

    def _judged(self, passages: Sequence[Passage], outputs: Sequence[bytes]) -> list[float]:
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

    def _check_sample(self, texts: int) -> None:
        """Raises InputError where there is too little to compare, or nothing to do it with."""
        if find_spec("sklearn") is None:
            raise InputError(f"scikit-learn is not installed: {INSTALL}")
        fewer = min(texts, len(self.reference))
        if fewer < MIN_TEXTS:
            raise InputError(f"{fewer} texts are too few, {MIN_TEXTS} are needed: a larger --count, or more text")
