"""The command `onesweep bench quality` and its settings. Its help reads this file: nothing heavy here."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onesweep.loadtest.commands import absolute, add_measurement
from onesweep.loadtest.report.record import check_report_options, write_report
from onesweep.stages.errors import InputError
from onesweep.stages.settings import flag, from_flags, setting

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


NOT_CHECKED = ("modes", "weights", "router", "temperatures")  # flags of texts that --check does not generate


def add_quality(quality: argparse.ArgumentParser) -> None:
    add_measurement(quality, QualitySettings, access=True, html=True)
    quality.add_argument("--check", action="store_true", help="check the panel: human text against texts that cheat")


def run_quality(options: argparse.Namespace) -> int:
    from onesweep.loadtest.quality.report import check_page, interval_table, quality_page, quality_table, reasons
    from onesweep.loadtest.quality.run import run_check
    from onesweep.loadtest.quality.run import run_quality as quality
    from onesweep.loadtest.workload.caller import Access
    from onesweep.stages.signals import ends_cleanly

    if options.check and (given := next((flag for flag in NOT_CHECKED if getattr(options, flag)), None)):
        raise InputError(f"--check generates nothing: leave out --{given}")
    settings = from_flags(QualitySettings, options, access=Access.of(options))
    check_report_options(options, charts=False)
    with ends_cleanly():
        checked = run_check(settings) if options.check else None
        result = checked or quality(settings)
    print(quality_table(result.rows))
    if checked is None:
        print("\njudge bits a byte, with 95 % intervals over prompts:\n" + interval_table(result.rows))
    print(f"\n{result.sentence}")
    sentences = checked.sentences() if checked else []
    print("".join(f"{line}\n" for line in (*reasons(result.rows), *sentences)), end="")
    page = check_page if checked else quality_page
    write_report(options, result.record, lambda: page(result.record, result.rows))
    return int(checked is not None and not checked.holds)
