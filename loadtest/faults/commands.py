"""The commands `bench chaos` and `bench chaos-training`."""

import argparse
from functools import partial

from loadtest.commands import add_measurement, run_bench, say
from loadtest.faults.settings import ChaosSettings, TrainingChaosSettings
from stages.settings import from_flags

add_chaos = partial(add_measurement, settings=ChaosSettings)
add_chaos_training = partial(add_measurement, settings=TrainingChaosSettings)


def run_chaos(options: argparse.Namespace) -> int:
    settings = from_flags(ChaosSettings, options)
    if settings.simulate:
        from loadtest.simulation.search import search

        return run_bench(options, lambda: search(settings.schedules, settings.seed, say))
    from loadtest.faults.serving_run import chaos, serving_report

    return run_bench(options, lambda: serving_report(chaos(settings, say)))


def run_chaos_training(options: argparse.Namespace) -> int:
    from loadtest.faults.training_run import train_under_faults, training_report

    settings = from_flags(TrainingChaosSettings, options)
    return run_bench(options, lambda: training_report(train_under_faults(settings, say)))
