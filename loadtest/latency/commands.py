"""The command `bench wan` and its settings. Help reads this file: nothing heavy here."""

import argparse
from functools import partial

from loadtest.commands import add_measurement, run_bench
from loadtest.latency.settings import BYTES, LENGTH_FLAGS, LEVELS, TOKENS, WanSettings, parse_lengths
from stages.settings import from_flags


def add_wan(wan: argparse.ArgumentParser) -> None:
    add_measurement(wan, WanSettings)
    lengths = wan.add_mutually_exclusive_group()
    for unit, help in (
        (BYTES, "bytes to generate (32,128)"),
        (TOKENS, "tokens to generate, in place of --bytes"),
        (LEVELS, "steps from noise to picture, of a bundle that draws (12)"),
    ):
        read = partial(parse_lengths, unit=unit)
        lengths.add_argument(LENGTH_FLAGS[unit], dest="lengths", type=read, metavar="N[,N]", help=help)
    wan.set_defaults(lengths=())


def run_wan(options: argparse.Namespace) -> int:
    from loadtest.latency.run import measure_wan, settled

    settings = from_flags(WanSettings, options, lengths=options.lengths)
    return run_bench(options, lambda: measure_wan(settled(settings)))
