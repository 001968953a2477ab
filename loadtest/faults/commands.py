"""The commands `bench chaos`, `bench chaos-training` and `bench rounds`."""

import argparse
import sys
from dataclasses import replace
from functools import partial

from onesweep.loadtest.commands import BenchReport, add_measurement, run_bench, say
from onesweep.loadtest.faults.settings import ChaosSettings, RoundsBenchSettings, TrainingChaosSettings
from onesweep.stages.settings import from_flags

add_chaos = partial(add_measurement, settings=ChaosSettings)
add_chaos_training = partial(add_measurement, settings=TrainingChaosSettings)
add_rounds = partial(add_measurement, settings=RoundsBenchSettings)


def run_chaos(options: argparse.Namespace) -> int:
    from onesweep.loadtest.faults.serving_report import serving_report
    from onesweep.loadtest.faults.serving_run import check_chaos
    from onesweep.loadtest.faults.serving_run import run_chaos as chaos

    settings = from_flags(ChaosSettings, options)
    check_chaos(settings)
    return run_bench(options, lambda: serving_report(chaos(settings, say)))


def run_chaos_training(options: argparse.Namespace) -> int:
    from onesweep.loadtest.faults.training_report import training_report
    from onesweep.loadtest.faults.training_run import check_training_chaos, run_training_chaos

    settings = from_flags(TrainingChaosSettings, options)
    check_training_chaos(settings)
    return run_bench(options, lambda: training_report(run_training_chaos(settings, say)))


def run_rounds(options: argparse.Namespace) -> int:
    from onesweep.loadtest.faults.rounds_bench import check_bench, measure_rounds, rounds_record, rounds_table
    from onesweep.loadtest.report.record import this_command

    settings = from_flags(RoundsBenchSettings, options)
    settings = replace(settings, config=settings.config.resolve())
    check_bench(settings)

    def bench() -> BenchReport:
        figures = measure_rounds(settings, lambda words: print(words, file=sys.stderr, flush=True))
        return BenchReport(rounds_table(figures), rounds_record(settings, figures, this_command()))

    return run_bench(options, bench)
