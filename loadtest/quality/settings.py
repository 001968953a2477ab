"""Settings of `onesweep bench quality` and `bench infill`. Their help reads this file: nothing heavy here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onesweep.loadtest.commands import absolute, numbers
from onesweep.stages.errors import InputError
from onesweep.stages.settings import flag, limits

if TYPE_CHECKING:
    from onesweep.loadtest.workload.caller import Access


def finite(text: str) -> float:
    """Raises ValueError for what is no finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def parse_temperatures(text: str) -> tuple[float, ...]:
    """The temperatures of "T,T". Raises InputError."""
    try:
        return tuple(dict.fromkeys(finite(part) for part in text.split(","))) if text else ()
    except ValueError:
        raise InputError(f"--temperatures {text!r} must be numbers such as 0.7,0.8,1") from None


@dataclass(frozen=True)
class QualitySettings:
    """Settings of `onesweep bench quality`; those without a flag of their own are marked."""

    prompts: Path = field(metadata=flag("held-out text: a file or folder", metavar="PATH"))
    # None: all that the router serves, without `infill`, whose texts answer another question, and `auto`.
    modes: str | None = field(
        default=None,
        metadata=flag(
            "with settings: sweep:steps=16, chunked:chunk=32, resample:ar:chunk=32:candidates=64",
            metavar="M[,M]",
            shown="all served",
        ),
    )
    count: int = field(default=100, metadata=flag("prompts", least=1))
    max_bytes: int = field(default=256, metadata=flag("bytes to generate", name="--bytes", least=1))
    prompt_bytes: int = field(default=64, metadata=flag("bytes of a prompt", least=1))
    judge: str | None = field(
        default=None,
        metadata=flag("smollm2-135m, ngram", metavar="NAME", shown="the first that is installed"),
    )
    train: Path | None = field(
        default=None, metadata=flag("training text", metavar="PATH", shown="train.txt beside the prompts")
    )
    temperatures: tuple[float, ...] = field(
        default=(), metadata=flag("a row for each, and bits between them", metavar="T[,T]", type=parse_temperatures)
    )
    seed: int = field(
        default=0,
        metadata=flag("shifts the prompts; prompt i has S + i", metavar="S", least=0, most=(1 << 63) - 1),
    )
    weights: Path | None = field(
        default=None,
        metadata=flag("bundle to serve", metavar="DIR", shown="the shipped weights", type=absolute),
    )
    access: Access | None = None  # from --router and the options of its connection
    in_flight: int = field(default=8, metadata=flag("requests at once", least=1))


@dataclass(frozen=True)
class InfillSettings(QualitySettings):
    """Settings of `onesweep bench infill`: prompts with a gap after each, which is filled at every length."""

    modes: str | None = field(
        default=None, metadata=flag("such as infill:ar:candidates=32", metavar="M[,M]", shown="infill,ar,local")
    )
    lengths: tuple[int, ...] = field(
        default=(4, 8, 16),
        metadata=flag("bytes of a gap", metavar="N[,N]", type=partial(numbers, flag="--lengths")),
    )
    max_bytes: int = field(default=16, metadata=limits(least=1))  # the longest gap
    temperatures: tuple[float, ...] = ()
    in_flight: int = field(default=4, metadata=flag("requests at once", least=1))
