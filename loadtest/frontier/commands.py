"""The command `onesweep bench frontier`."""

import argparse
from functools import partial

from onesweep.loadtest.commands import add_measurement, say
from onesweep.loadtest.frontier.settings import FrontierSettings
from onesweep.loadtest.report.record import check_report_options, write_report
from onesweep.stages.errors import InputError
from onesweep.stages.settings import check_destination, from_flags

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
