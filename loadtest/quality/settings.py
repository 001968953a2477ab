"""Settings of `onesweep bench quality`. Its help reads this file: nothing heavy here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onesweep.loadtest.commands import absolute
from onesweep.stages.errors import InputError
from onesweep.stages.settings import flag, setting

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
    modes: str | None = setting(
        None,
        "with settings: sweep:steps=16, chunked:chunk=32, resample:ar:chunk=32:candidates=64",
        metavar="M[,M]",
        shown="all served",
    )
    count: int = setting(100, "prompts", least=1)
    max_bytes: int = setting(256, "bytes to generate", name="--bytes", least=1)
    prompt_bytes: int = setting(64, "bytes of a prompt", least=1)
    judge: str | None = setting(None, "smollm2-135m, ngram", metavar="NAME", shown="the first that is installed")
    train: Path | None = setting(None, "training text", metavar="PATH", shown="train.txt beside the prompts")
    temperatures: tuple[float, ...] = setting(
        (), "a row for each, and bits between them", metavar="T[,T]", type=parse_temperatures
    )
    seed: int = setting(0, "shifts the prompts; prompt i has S + i", metavar="S", least=0, most=(1 << 63) - 1)
    weights: Path | None = setting(None, "bundle to serve", metavar="DIR", shown="the shipped weights", type=absolute)
    access: Access | None = None  # from --router and the options of its connection
    in_flight: int = setting(8, "requests at once", least=1)
