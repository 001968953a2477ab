"""The commands `bench wan`, `bench warm` and `bench first-token`."""

import argparse
from functools import partial
from pathlib import Path

from onesweep.loadtest.commands import add_measurement, say
from onesweep.loadtest.latency.settings import FirstTokenSettings, WanSettings, WarmSettings
from onesweep.loadtest.report.record import check_report_options, write_report
from onesweep.loadtest.workload.arms import BYTES, LENGTH_FLAGS, LEVELS, TOKENS, parse_lengths
from onesweep.loadtest.workload.prompts import parse_prompts
from onesweep.stages.settings import from_flags
from onesweep.stages.signals import ends_cleanly


def add_wan(wan: argparse.ArgumentParser) -> None:
    add_measurement(wan, WanSettings, html=True)
    lengths = wan.add_mutually_exclusive_group()
    for unit, help in (
        (BYTES, "bytes to generate (32,128)"),
        (TOKENS, "tokens to generate, in place of --bytes"),
        (LEVELS, "steps from noise to picture, of a bundle that draws (12)"),
    ):
        read = partial(parse_lengths, unit=unit)
        lengths.add_argument(LENGTH_FLAGS[unit], dest="lengths", type=read, metavar="N[,N]", help=help)
    wan.set_defaults(lengths=())
    wan.add_argument("--text", default="", metavar="T[,T]", help="prompts: novel, copying (novel)")
    own = "prompts of your own, one a file"
    wan.add_argument("--prompt", type=Path, nargs="+", action="extend", default=[], metavar="FILE", help=own)


add_warm = partial(add_measurement, settings=WarmSettings)
add_first_token = partial(add_measurement, settings=FirstTokenSettings)


def run_wan(options: argparse.Namespace) -> int:
    from onesweep.loadtest.latency.links import LINKS
    from onesweep.loadtest.latency.report import report
    from onesweep.loadtest.latency.rows import wan_table
    from onesweep.loadtest.latency.run import check_wan, measure_wan, settled, wan_record

    prompts = parse_prompts(options.text, options.prompt) if options.text or options.prompt else ()
    settings = settled(from_flags(WanSettings, options, lengths=options.lengths, prompts=prompts))
    check_report_options(options)
    profiles = check_wan(settings)
    with ends_cleanly():
        figures = measure_wan(settings, profiles, say)
    print(wan_table(figures.rows))
    if figures.links:
        print("\nthe lab's links, plain sockets:\n" + LINKS.aligned(figures.links))
    if figures.control:
        print("\nthe lab against plain loopback:\n" + wan_table(figures.control))
    record = wan_record(settings, figures)
    write_report(options, record, lambda: report(record))
    return int(any(row["failures"] for row in figures.rows))


def run_warm(options: argparse.Namespace) -> int:
    from onesweep.loadtest.latency.first_token import WARM, measure_warm
    from onesweep.loadtest.latency.run import check_warm
    from onesweep.loadtest.report.record import origin

    settings = from_flags(WarmSettings, options)
    profile = check_warm(settings)
    check_report_options(options)
    say(f"{profile.name}: {settings.rounds} deployments for each mode ...")
    with ends_cleanly():
        rows = measure_warm(settings, profile)
    print(WARM.aligned(rows))
    write_report(options, {"bench": "warm", "profile": profile.name, "rows": rows, **origin()})
    return 0


def run_first_token(options: argparse.Namespace) -> int:
    from onesweep.loadtest.lab.profile import profile_named
    from onesweep.loadtest.latency.first_token import first_token_table, measure_first_token, prompt_for
    from onesweep.loadtest.report.record import origin

    settings = from_flags(FirstTokenSettings, options)
    profile = profile_named(settings.profile)
    check_report_options(options)
    prompt, alphabet = prompt_for(settings, profile)
    with ends_cleanly():
        rows, turns = measure_first_token(settings, profile, prompt, alphabet, say)
    print(first_token_table(rows, turns))
    record = {"profile": profile.name, "prompt_symbols": settings.prompt_symbols, "rows": rows, "turns": turns}
    write_report(options, {"bench": "first-token", **origin(), **record})
    return int(any(row["failed"] for row in (*rows, *turns)))
