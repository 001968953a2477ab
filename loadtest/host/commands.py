"""The command `onesweep bench host`: what a machine makes of hosts, before anything is served from it."""

import argparse
from functools import partial

from loadtest.commands import BenchReport, add_measurement, run_bench
from loadtest.host.settings import HostBenchSettings
from stages.settings import from_flags

add_host = partial(add_measurement, settings=HostBenchSettings)


def run_host(options: argparse.Namespace) -> int:
    settings = from_flags(HostBenchSettings, options)

    def bench() -> BenchReport:
        # torch takes a second to import: only when it runs
        if settings.widths:
            from loadtest.host.shapes import measure_shapes as measure
        else:
            from loadtest.host.ring import measure_ring as measure
        return BenchReport.of_rows("host", settings, measure(settings))

    return run_bench(options, bench)
