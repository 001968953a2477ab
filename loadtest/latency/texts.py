"""Quality of the texts of a run without a judge: their loss under the served model, and their variety.

Read with teacher forcing after the run, each after its own prompt, at temperature 1. A low loss can be bought with
monotony, so entropies stand beside it, and the excess: what a token costs beyond the entropy of the model's own odds at
its place. A text that the model draws at temperature 1 has none, on average; below 0 a text is more usual than the
model's. Every spread is a standard error over texts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onesweep.loadtest.latency.interleave import Sample
from onesweep.loadtest.latency.rows import NO_TEXTS
from onesweep.loadtest.quality.measures import distinct_pairs, gram_counts, pooled_entropy, symbol_counts, words_of
from onesweep.loadtest.workload.arms import SPECULATIVE, Arm
from onesweep.loadtest.workload.pipeline import Pipeline, Surprise
from onesweep.loadtest.workload.texts import continued
from onesweep.serving.modes.tokenizer import tokenizer_of


@dataclass(frozen=True)
class ReadText:
    """One text, as the served model reads it."""

    symbols: tuple[int, ...]
    surprise: Surprise  # after its prompt


Texts = dict[int, ReadText]  # of one arm, by the number of the request


class TextReader:
    """Reads texts with the model in `directory`. Each distinct text is read once."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError."""
        self.tokenizer, self.pipeline = tokenizer_of(directory), Pipeline(directory)
        self._known: dict[tuple[str, bytes], ReadText] = {}

    def texts(self, arm: Arm, samples: Sequence[Sample]) -> Texts:
        """Texts of the requests that ended well."""
        return {
            sample.number: self._read(arm.prompts.text(sample.number), bytes.fromhex(sample.account["output_hex"]))
            for sample in samples
            if sample.account is not None
        }

    def _read(self, prompt: str, output: bytes) -> ReadText:
        if (prompt, output) not in self._known:
            before, text = continued(self.tokenizer, prompt.encode(), output)
            self._known[prompt, output] = ReadText(tuple(text), self.pipeline.surprise(before, text))
        return self._known[prompt, output]


def text_figures(taken: Mapping[Arm, Sequence[Sample]], reader: TextReader) -> dict[Arm, dict[str, Any]]:
    """The keys of NO_TEXTS for each arm. The arms of one profile: they are held against each other."""
    read = {arm: reader.texts(arm, samples) for arm, samples in taken.items()}
    return {
        arm: NO_TEXTS | _own_figures(texts, taken[arm]) | _gap(arm, read) | _sameness(arm, taken)
        for arm, texts in read.items()
    }


def _own_figures(texts: Texts, samples: Sequence[Sample]) -> dict[str, Any]:
    known = [text for text in texts.values() if text.symbols]
    if not known:
        return {}
    counts = [len(text.symbols) for text in known]
    nats, error = mean_of_ratio([text.surprise.nats for text in known], counts)
    excess = mean_of_ratio([text.surprise.nats - text.surprise.expected for text in known], counts)
    tokens = pooled_entropy([text.symbols for text in known], symbol_counts)
    grams = pooled_entropy([text.symbols for text in known], gram_counts)
    accounts = {sample.number: sample.account for sample in samples if sample.account is not None}
    written = [bytes.fromhex(account["output_hex"]).decode(errors="replace") for account in accounts.values()]
    shares = [share for text in written if (share := distinct_pairs(words_of(text))) is not None]
    return {
        "texts": len(known),
        "respelled": sum(len(texts[number].symbols) != _written(account) for number, account in accounts.items()),
        "nats_per_token": nats,
        "nats_error": error,
        "excess_nats": excess[0],
        "excess_error": excess[1],
        "token_entropy": tokens[0] if tokens else None,
        "token_entropy_error": _known(tokens[1]) if tokens else None,
        "gram_entropy": grams[0] if grams else None,
        "distinct_2": float(np.mean(shares)) if shares else None,
    }


def _written(account: dict[str, Any]) -> int:
    """Symbols that stand in a text: the last of one that the model ended does not."""
    return int(account["output_tokens"]) - bool(account["stopped"])


def _sameness(arm: Arm, taken: Mapping[Arm, Sequence[Sample]]) -> dict[str, Any]:
    """Texts equal to those of `ar`, for a mode that promises them."""
    exact = arm.choice.mode == SPECULATIVE or (arm.choice.mode == "verified" and arm.temperature == 0)
    other = _beside(arm, "ar", taken)
    if not exact or other is None:
        return {}
    theirs = {s.number: s.account["output_hex"] for s in taken[other] if s.account is not None}
    ours = {s.number: s.account["output_hex"] for s in taken[arm] if s.account is not None}
    both = theirs.keys() & ours.keys()
    if not both:
        return {}
    return {"same_as_ar": sum(theirs[number] == ours[number] for number in both), "compared": len(both)}


def _gap(arm: Arm, read: Mapping[Arm, Texts]) -> dict[str, Any]:
    """(CE of `local` - CE of the arm) / (CE of `local` - CE of `ar`), over the prompts that all three answered."""
    local, ar = (_beside(arm, mode, read) for mode in ("local", "ar"))
    # what n-grams write by themselves is no mode: the gap from there is not known
    if arm.choice.mode != "resample" or arm.choice.drafter == "ngram" or local is None or ar is None:
        return {}
    three = [read[local], read[arm], read[ar]]
    numbers = [n for n in sorted(set.intersection(*map(set, three))) if all(texts[n].symbols for texts in three)]
    if not numbers:
        return {}
    nats = np.array([[texts[number].surprise.nats for number in numbers] for texts in three])
    counts = np.array([[len(texts[number].symbols) for number in numbers] for texts in three])

    def closed(kept: NDArray[np.bool_]) -> float:
        own, mode, best = nats[:, kept].sum(axis=1) / counts[:, kept].sum(axis=1)
        return float((own - mode) / (own - best)) if own != best else math.nan

    value, error = jackknife(closed, len(numbers))
    return {"gap_closed": _known(value), "gap_error": error}


def _beside(arm: Arm, mode: str, arms: Mapping[Arm, Any]) -> Arm | None:
    """The arm of another mode that asks for the same, with the same codec if there is one; else the first."""
    alike = [other for other in arms if other.choice.mode == mode and replace(other, choice=arm.choice) == arm]
    return next((other for other in alike if other.choice.codec == arm.choice.codec), alike[0] if alike else None)


def mean_of_ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float | None]:
    """Sum of `over` by sum of `under`, and its standard error, linearised (Cochran 1977, 2.33); None of one text."""
    a, b = np.asarray(over, float), np.asarray(under, float)
    ratio, n = a.sum() / b.sum(), len(a)
    if n < 2:
        return float(ratio), None
    return float(ratio), float(np.sqrt(n / (n - 1) * ((a - ratio * b) ** 2).sum()) / b.sum())


def jackknife(value: Callable[[NDArray[np.bool_]], float], count: int) -> tuple[float, float | None]:
    """`value` of all, and its standard error from leaving each out once; None where that has no meaning.

    :param value: of what a mask (count,) keeps.
    """
    every = np.ones(count, bool)
    if count < 2:
        return value(every), None
    without = np.array([value(every & (np.arange(count) != i)) for i in range(count)])
    return value(every), _known(float(np.sqrt((count - 1) * np.mean((without - without.mean()) ** 2))))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
