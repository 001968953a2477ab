"""The commands `onesweep bench host` and `peers`: what a machine makes of hosts, and of the same file elsewhere."""

import argparse
from functools import partial

from loadtest.commands import BenchReport, add_measurement, run_bench
from loadtest.host.settings import HostBenchSettings, PeerSettings
from stages.settings import from_flags

add_host = partial(add_measurement, settings=HostBenchSettings)
add_peers = partial(add_measurement, settings=PeerSettings)


def run_host(options: argparse.Namespace) -> int:
    settings = from_flags(HostBenchSettings, options)

    def bench() -> BenchReport:
        from loadtest.host.ring import measure_ring  # torch takes a second to import: only when it runs

        return BenchReport.of_rows("host", settings, measure_ring(settings))

    return run_bench(options, bench)


def run_peers(options: argparse.Namespace) -> int:
    settings = from_flags(PeerSettings, options)

    def bench() -> BenchReport:
        from loadtest.host.peers import measure_peers

        return BenchReport.of_rows("peers", settings, measure_peers(settings))

    return run_bench(options, bench)
