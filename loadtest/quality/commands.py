"""The command `onesweep bench quality` and its settings. Its help reads this file: nothing heavy here."""

from __future__ import annotations

import argparse
from functools import partial

from loadtest.commands import BenchReport, add_measurement, run_bench
from loadtest.quality.settings import QualitySettings
from stages.errors import InputError
from stages.settings import check_destination, from_flags

add_quality = partial(add_measurement, settings=QualitySettings)


def run_quality(options: argparse.Namespace) -> int:
    settings = from_flags(QualitySettings, options)
    if (settings.prompts is None) == (settings.pictures is None):
        raise InputError("name what to measure against: --prompts with held-out text, or --pictures")
    if settings.write is not None:
        if settings.pictures is not None:
            raise InputError("--write is for text: mode auto chooses among modes that write")
        check_destination(settings.write, "--write")

    def bench() -> BenchReport:
        if settings.pictures is not None:
            from loadtest.quality.pictures import measure_pictures as measure
        else:
            from loadtest.quality.text import measure_text as measure
        return measure(settings)

    return run_bench(options, bench)
