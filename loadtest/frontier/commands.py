"""The command `onesweep frontier`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import InputError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from loadtest.frontier.settings import FrontierSettings
    from loadtest.frontier.worth import Ranking

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register(subparsers: Subparsers) -> None:
    from serving.shipped import SHIPPED

    frontier = subparsers.add_parser(
        "frontier",
        help="quality against seconds over far links, and the file that mode auto chooses from",
        description="Quality against seconds, a point for each mode and setting on each network (Linux, root).",
    )
    frontier.add_argument("--profiles", default="links-20,links-60,links-150", metavar="P[,P]", help="networks")
    frontier.add_argument("--profiles-file", type=Path, metavar="FILE", help="a file with more profiles")
    frontier.add_argument("--quality", type=Path, metavar="FILE", help="of `quality --json` (the bundle's frontier)")
    frontier.add_argument("--judge-on", type=Path, metavar="PATH", help="measure the quality now, on held-out text")
    frontier.add_argument("--count", type=int, default=50, metavar="N", help="prompts for --judge-on (50)")
    frontier.add_argument("--modes", metavar="SPECS", help="of those that were measured, as in `quality` (all)")
    frontier.add_argument("--bytes", type=int, default=256, metavar="N", help="bytes to generate (256)")
    frontier.add_argument("--requests", type=int, default=5, metavar="R", help="of each setting on each network (5)")
    frontier.add_argument("--seed", type=int, default=0, metavar="S", help="of the first request (0)")
    frontier.add_argument("--prompts", type=Path, metavar="PATH", help="text to cut prompts from (built-in sentences)")
    frontier.add_argument("--budgets", default="", metavar="MS[,MS]", help="for mode auto (between the points)")
    frontier.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    frontier.add_argument("--hosts", type=int, metavar="N", help="hosts that share the blocks (3)")
    frontier.add_argument("--write", type=Path, metavar="FILE", help="the file that mode auto chooses from")
    frontier.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    frontier.add_argument("--svg", type=Path, metavar="FILE", help="the picture")
    frontier.add_argument("--html", type=Path, metavar="FILE", help="a report with the picture")
    frontier.set_defaults(run=run_frontier_command)


def run_frontier_command(options: argparse.Namespace) -> int:
    from loadtest.destination import write_json
    from loadtest.frontier.page import frontier_page, record_picture
    from loadtest.frontier.run import frontier_record, measure_frontier
    from loadtest.frontier.settings import check_settings
    from loadtest.frontier.table import auto_table, failures, points_table
    from loadtest.meter import open_meter
    from loadtest.page import write_page
    from serving.deployment import ends_cleanly

    settings = _settings(options)
    _check_files(options)
    command = shlex.join(["onesweep", *sys.argv[1:]])
    with ends_cleanly():
        plan = check_settings(settings, _judge_now(options) if options.judge_on else None)
        figures = measure_frontier(plan, options.write, command, lambda text: print(text, flush=True), open_meter)
    record = frontier_record(plan, figures, command)
    print("\n" + points_table(figures.points, plan.ranking.human_bits))
    if figures.auto:
        print("\nmode auto:\n\n" + auto_table(figures.auto))
    print("".join(f"{line}\n" for line in (*failures(figures.points), *failures(figures.auto), *figures.problems)))
    if options.json:
        write_json(options.json, record)
    if options.svg:
        write_page(options.svg, record_picture(record) + "\n")
    if options.html:
        write_page(options.html, frontier_page(record))
    return 0 if figures.points and not figures.problems else 1


def _settings(options: argparse.Namespace) -> FrontierSettings:
    from loadtest.commands import numbers
    from loadtest.frontier.settings import FrontierSettings
    from loadtest.wan_bench.arms import parse_names

    if options.quality and options.judge_on:
        raise InputError("--quality has what --judge-on would measure: leave one of them out")
    return FrontierSettings(
        parse_names(options.profiles),
        options.checkpoint.resolve(),
        options.quality,
        None if options.judge_on else options.modes,
        options.bytes,
        options.requests,
        options.seed,
        options.prompts,
        numbers(options.budgets, "--budgets"),
        options.profiles_file,
        options.hosts,
    )


def _judge_now(options: argparse.Namespace) -> Ranking:
    """What each mode's text is worth, measured with the panel. Raises OnesweepError."""
    from loadtest.frontier.worth import ranking_of
    from loadtest.meter import open_meter
    from loadtest.quality.run import QualitySettings, run_quality

    settings = QualitySettings(
        options.judge_on,
        options.modes,
        options.count,
        options.bytes,
        seed=options.seed,
        weights=options.checkpoint.resolve(),
    )
    return ranking_of(run_quality(settings, "", open_meter).record())


def _check_files(options: argparse.Namespace) -> None:
    """Raises InputError before anything is measured for a file that could not be written after it."""
    from loadtest.destination import check_destination
    from loadtest.wan_bench.pictures import check_plotting

    for flag in ("json", "write", "svg", "html"):
        if path := getattr(options, flag):
            check_destination(path, f"--{flag}")
    if options.svg or options.html:
        check_plotting()
