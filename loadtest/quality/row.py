"""One row of the table: an arm, or human text, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

from loadtest.quality.intervals import Estimate, flat

HUMAN = "human"
JUDGED = "judge_bits_per_byte"
GRAMS = "gram_entropy"
AT_HUMAN_ENTROPY = "judge_bits_at_human_entropy"

PANEL = {
    JUDGED: "bits that the judge needs for a byte of the text, given the prompt",
    "ngram_bits_per_byte": "the same of an n-gram model fitted to the training text",
    "byte_entropy": "bits of the bytes of all texts together: low where few different bytes are used",
    GRAMS: "bits of all runs of four bytes: low where the same pieces come again",
    "word_entropy": "bits of all words: low where few words are used",
    "distinct_2": "share of a text's pairs of words that are different: low where a text repeats itself",
    "auc": "how well a classifier tells the texts from human ones: 0.5 not at all, 1 always",
    "mauve": "overlap with human text as the judge's hidden states see it: 1 the same, 0 none",
    "unseen_words": "share of words that the training text does not have: spelling",
    "copied_spans": "share of 32-byte spans that stand in the training text: copying",
}
"""The figures that a verdict looks at, and what each means."""

DERIVED = {
    "judge_minus_human": "judge bits less those of the true continuations, prompt by prompt",
    "judge_minus_local": "judge bits less those of mode `local`, prompt by prompt",
    AT_HUMAN_ENTROPY: "judge bits where the 4-gram entropy is the human one, between the temperatures around it",
    "joined_bits_per_byte": "judge bits of the text and the true text after it: low where the one leads to the other",
    "exact_match": "share of texts that are the true continuation",
}
FIGURES = (*PANEL, *DERIVED)


@dataclass(frozen=True)
class QualityRow:
    """What was measured of one arm. None where a figure has no meaning; `reasons` says why."""

    mode: str
    """`human` for the true continuations."""
    scorer: str | None = None
    chunk: int | None = None
    candidates: int | None = None
    temperature: float | None = None
    steps: int | None = None
    """Euler steps in each block, where the spec names them."""
    spec: str = ""
    """What gives this arm on the command line."""
    sweeps: float | None = None
    """Mean over texts; likewise those below, unless they say otherwise."""
    n: int = 0
    seconds: float | None = None
    """Median latency of a text, while others are generated beside it."""
    host_seconds: float | None = None
    """Arithmetic of the hosts for a text."""
    compute_seconds: float | None = None
    """The same with the router's: its drafter works there."""
    wire_bytes: float | None = None
    acceptance: float | None = None
    effective_samples: float | None = None
    divergence_bits: float | None = None
    figures: dict[str, Estimate] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

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
