"""The commands `bench chaos`, `bench chaos-training` and `wan train`."""

import argparse
from functools import partial

from loadtest.commands import add_measurement, run_bench, say
from loadtest.faults.settings import ChaosSettings, DemoSettings, TrainingChaosSettings
from stages.settings import add_flags, from_flags
from stages.signals import ends_cleanly

add_chaos = partial(add_measurement, settings=ChaosSettings)
add_chaos_training = partial(add_measurement, settings=TrainingChaosSettings)
add_wan_train = partial(add_flags, cls=DemoSettings)


def run_chaos(options: argparse.Namespace) -> int:
    from loadtest.faults.serving_run import chaos, serving_report

    settings = from_flags(ChaosSettings, options)
    return run_bench(options, lambda: serving_report(chaos(settings, say)))


def run_chaos_training(options: argparse.Namespace) -> int:
    from loadtest.faults.training_run import train_under_faults, training_report

    settings = from_flags(TrainingChaosSettings, options)
    return run_bench(options, lambda: training_report(train_under_faults(settings, say)))


def run_wan_train(options: argparse.Namespace) -> int:
    from loadtest.faults.training_demo import train_and_serve  # imports torch

    settings = from_flags(DemoSettings, options)
    with ends_cleanly():
        train_and_serve(settings, say)
    return 0
