"""The command `onesweep bench frontier` and its settings. Help reads this file: nothing heavy here."""

import argparse
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from onesweep.loadtest.commands import CHECKPOINT, add_measurement, numbers, say
from onesweep.loadtest.report.record import check_report_options, write_report
from onesweep.loadtest.workload.arms import parse_names
from onesweep.loadtest.workload.testbed import default_hosts
from onesweep.serving.cli.deployment import SHIPPED
from onesweep.stages.errors import InputError
from onesweep.stages.settings import check_destination, from_flags, setting


@dataclass(frozen=True)
class FrontierSettings:
    """Settings of `onesweep bench frontier`."""

    profiles: tuple[str, ...] = setting(
        ("links-20", "links-60", "links-150"), "networks", metavar="P[,P]", type=parse_names
    )
    profiles_file: Path | None = setting(None, "file with more profiles")
    # A record of `onesweep bench quality`, or a frontier.
    quality: Path | None = setting(None, "of `quality --json`", shown="the bundle's frontier")
    judge_on: Path | None = setting(None, "measure the quality now, on held-out text", metavar="PATH")
    count: int = setting(50, "prompts for --judge-on")
    modes: str | None = setting(None, "of those that were measured, as in `quality`", metavar="SPECS", shown="all")
    max_bytes: int = setting(256, "bytes to generate", name="--bytes", least=1)
    # Of each arm on each profile, after one that warms up.
    requests: int = setting(5, "of each setting on each network", metavar="R", least=1)
    seed: int = setting(0, "of the first request", metavar="S", least=0, most=(1 << 63) - 1)
    prompts: Path | None = setting(None, "text to cut prompts from", metavar="PATH", shown="built-in sentences")
    budgets_ms: tuple[int, ...] = setting(
        (),
        "for mode auto",
        name="--budgets",
        metavar="MS[,MS]",
        shown="between the points",
        type=partial(numbers, flag="--budgets", number=int),
    )
    checkpoint: Path = field(default=SHIPPED.resolve(), metadata=CHECKPOINT)
    hosts: int | None = setting(None, "hosts that share the blocks", shown="3")
    write: Path | None = setting(None, "the file that mode auto chooses from")

    @property
    def host_count(self) -> int:
        return self.hosts or default_hosts(self.checkpoint)


add_frontier = partial(add_measurement, settings=FrontierSettings, html=True, svg=True)


def run_frontier(options: argparse.Namespace) -> int:
    from onesweep.loadtest.frontier.report import AUTO, failures, frontier_page, points_table, record_picture
    from onesweep.loadtest.frontier.run import checked_plan, frontier_record, measure_frontier
    from onesweep.stages.signals import ends_cleanly

    settings = from_flags(FrontierSettings, options)
    if settings.quality and settings.judge_on:
        raise InputError("--quality has what --judge-on would measure: leave one of them out")
    check_report_options(options)
    if settings.write:
        check_destination(settings.write, "--write")
    with ends_cleanly():
        plan = checked_plan(settings)
        figures = measure_frontier(plan, say)
    record = frontier_record(plan, figures)
    print("\n" + points_table(figures.points, plan.ranking.human_bits))
    if figures.auto:
        print("\nmode auto:\n\n" + AUTO.markdown(figures.auto))
    print("".join(f"{line}\n" for line in (*failures(figures.points), *failures(figures.auto), *figures.problems)))
    write_report(options, record, lambda: frontier_page(record), lambda: record_picture(record) + "\n")
    return 0 if figures.points and not figures.problems else 1
