"""The commands `bench chaos` and `bench chaos-training`."""

import argparse
from dataclasses import replace
from functools import partial

from onesweep.loadtest.commands import BenchReport, add_measurement, run_bench, say
from onesweep.loadtest.faults.settings import ChaosSettings, TrainingChaosSettings
from onesweep.stages.settings import from_flags

add_chaos = partial(add_measurement, settings=ChaosSettings)
add_chaos_training = partial(add_measurement, settings=TrainingChaosSettings)


def run_chaos(options: argparse.Namespace) -> int:
    from onesweep.loadtest.faults.serving_report import serving_report
    from onesweep.loadtest.faults.serving_run import check_chaos
    from onesweep.loadtest.faults.serving_run import run_chaos as chaos

    settings = from_flags(ChaosSettings, options)
    check_chaos(settings)
    return run_bench(options, lambda: serving_report(chaos(settings, say)))


def run_chaos_training(options: argparse.Namespace) -> int:
    from onesweep.loadtest.faults.training_figures import measure_training
    from onesweep.loadtest.faults.training_report import training_report
    from onesweep.loadtest.faults.training_run import check_training_chaos, run_training_chaos

    settings = from_flags(TrainingChaosSettings, options)
    if settings.faults == ("none",):
        settings = replace(settings, faults=())
    check_training_chaos(settings)

    def bench() -> BenchReport:
        if settings.faults is None or settings.faults:
            return training_report(run_training_chaos(settings, say))
        figures = measure_training(settings, say)
        return BenchReport(figures.table(), figures.record())

    return run_bench(options, bench)
