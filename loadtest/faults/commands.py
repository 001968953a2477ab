"""The command `bench chaos`."""

import argparse
from functools import partial

from loadtest.commands import add_measurement, run_bench, say
from loadtest.faults.settings import ChaosSettings
from stages.errors import InputError
from stages.settings import from_flags

add_chaos = partial(add_measurement, settings=ChaosSettings)


def run_chaos(options: argparse.Namespace) -> int:
    settings = from_flags(ChaosSettings, options)
    known = ("seed", "schedules") if settings.simulate else [name for name in vars(settings) if name != "schedules"]
    usual = ChaosSettings(**{name: getattr(settings, name) for name in (*known, "simulate")})
    if other := [name for name in vars(settings) if getattr(settings, name) != getattr(usual, name)]:
        how = "has no say in" if settings.simulate else "is for"
        raise InputError(f"--{other[0].replace('_', '-')} {how} --simulate: leave one of them out")
    if settings.simulate:
        from loadtest.simulation.search import search

        return run_bench(options, lambda: search(settings.schedules, settings.seed, say))
    from loadtest.faults.serving_run import chaos, serving_report

    return run_bench(options, lambda: serving_report(chaos(settings, say)))
