"""The command `bench chaos`, and its settings, which are its flags."""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from loadtest.commands import add_measurement, run_bench, say
from stages.errors import InputError
from stages.settings import from_flags, setting


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """A deployment, a load, and what happens to them."""

    minutes: float = setting(10.0, "Minutes of load", metavar="M", above=0, most=7 * 24 * 60)
    profile: str = setting("links-60", "Links; loopback needs no root, and cannot be cut", metavar="P")
    seed: int = setting(0, "Seed for the fault schedule and the prompts", metavar="S", least=0, most=(1 << 32) - 1)
    length_scale: float = 1.0  # of every fault's length: below 1 a test takes less time
    checkpoint: Path | None = setting(None, "Bundle to serve", shown="the shipped weights", metavar="DIR")
    requests_at_once: int = 4
    patience_s: float = 60.0  # after which a client gives a request up
    warm_up_s: float = 5.0  # of load before the first fault
    simulate: bool = setting(False, "A tiny model in virtual time: schedules of faults, drawn from --seed and after")
    schedules: int = setting(1000, "With --simulate: how many", least=1, most=10_000_000)

    @property
    def seconds(self) -> float:
        return self.minutes * 60


add_chaos = partial(add_measurement, settings=ChaosSettings)


def run_chaos(options: argparse.Namespace) -> int:
    settings = from_flags(ChaosSettings, options)
    if settings.schedules != ChaosSettings.schedules and not settings.simulate:
        raise InputError("--schedules is for simulations: add --simulate")
    if settings.simulate:
        if replace(settings, seed=0, schedules=ChaosSettings.schedules) != ChaosSettings(simulate=True):
            raise InputError("--simulate takes --seed and --schedules alone: leave the others out")
        from loadtest.simulation.search import search

        return run_bench(options, lambda: search(settings.schedules, settings.seed, say))
    from loadtest.faults.serving_run import chaos, serving_report

    return run_bench(options, lambda: serving_report(chaos(settings, say)))
