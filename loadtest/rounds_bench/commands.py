"""The command `bench rounds`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register_rounds_bench(benches: Subparsers) -> None:
    from loadtest.rounds_bench.settings import SIX

    rounds = benches.add_parser(
        "rounds",
        help="rounds over emulated far links against one place, and against what `plan` said",
        description="Workers over emulated far links against one place with as many samples, and against the plan.",
    )
    rounds.add_argument("--config", type=Path, default=SIX, metavar="FILE", help="settings (a small model, 3 blocks)")
    rounds.add_argument("--data", type=Path, metavar="PATH", help="UTF-8 text (default: Python's docs)")
    rounds.add_argument("--profile", default="links-60", metavar="P", help="links, or loopback (links-60)")
    rounds.add_argument("--profiles", type=Path, metavar="FILE", help="a file with more profiles")
    rounds.add_argument("--up-mbps", type=float, default=20.0, metavar="M", help="of each worker's uplink (20)")
    rounds.add_argument("--pace-s", type=float, default=0.4, metavar="S", help="of a local step, at least (0.4)")
    rounds.add_argument("--seeds", default="0", metavar="N[,N]", help="a run over the links and one here for each (0)")
    rounds.add_argument("--within-s", type=float, default=3600.0, metavar="S", help="give a run up after that (3600)")
    rounds.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    rounds.set_defaults(run=run_rounds_bench)


def run_rounds_bench(options: argparse.Namespace) -> int:
    from loadtest.commands import numbers
    from loadtest.destination import check_destination, write_json
    from loadtest.rounds_bench.bench import measure_rounds, rounds_record, rounds_table
    from loadtest.rounds_bench.settings import RoundsBench, check_bench
    from serving.deployment import ends_cleanly

    bench = RoundsBench(
        options.config.resolve(),
        options.data,
        options.profile,
        options.profiles,
        options.up_mbps,
        options.pace_s,
        numbers(options.seeds, "--seeds"),
        options.within_s,
    )
    check_bench(bench)
    if options.json:
        check_destination(options.json)
    with ends_cleanly():
        figures = measure_rounds(bench, lambda words: print(words, file=sys.stderr, flush=True))
    print(rounds_table(figures))
    if options.json:
        write_json(options.json, rounds_record(bench, figures, shlex.join(["onesweep", *sys.argv[1:]])))
    return 0
