"""The command `onesweep frontier`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import InputError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from loadtest.frontier.run import FrontierSettings
    from loadtest.frontier.worth import Ranking

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register(subparsers: Subparsers) -> None:
    from serving.cli.deployment import SHIPPED

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
    from loadtest.frontier.report import auto_table, failures, frontier_page, points_table, record_picture
    from loadtest.frontier.run import checked_plan, frontier_record, measure_frontier
    from loadtest.report.record import write_json
    from loadtest.report.table import open_meter
    from serving.cli.deployment import ends_cleanly
    from stages.settings import write_destination

    settings = _settings(options)
    _check_files(options)
    with ends_cleanly():
        plan = checked_plan(settings, _judge_now(options) if options.judge_on else None)
        figures = measure_frontier(plan, options.write, lambda text: print(text, flush=True), open_meter)
    record = frontier_record(plan, figures)
    print("\n" + points_table(figures.points, plan.ranking.human_bits))
    if figures.auto:
        print("\nmode auto:\n\n" + auto_table(figures.auto))
    print("".join(f"{line}\n" for line in (*failures(figures.points), *failures(figures.auto), *figures.problems)))
    if options.json:
        write_json(options.json, record)
    if options.svg:
        write_destination(options.svg, record_picture(record) + "\n")
    if options.html:
        write_destination(options.html, frontier_page(record))
    return 0 if figures.points and not figures.problems else 1


def _settings(options: argparse.Namespace) -> FrontierSettings:
    from loadtest.commands import numbers
    from loadtest.frontier.run import FrontierSettings
    from loadtest.workload.arms import parse_names

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
    """Measure the quality of each mode's text with the panel. Raises OnesweepError."""
    from loadtest.frontier.worth import ranking_of
    from loadtest.quality.run import run_quality
    from loadtest.quality.settings import QualitySettings
    from loadtest.report.table import open_meter

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
    from loadtest.report.chart import check_plotting
    from stages.settings import check_destination

    for flag in ("json", "write", "svg", "html"):
        if path := getattr(options, flag):
            check_destination(path, f"--{flag}")
    if options.svg or options.html:
        check_plotting()
