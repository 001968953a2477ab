"""The command `onesweep bench quality`."""

import argparse

from onesweep.loadtest.commands import add_measurement
from onesweep.loadtest.quality.settings import QualitySettings
from onesweep.loadtest.report.record import check_report_options, write_report
from onesweep.stages.errors import InputError
from onesweep.stages.settings import from_flags

NOT_CHECKED = ("modes", "weights", "router", "temperatures")  # flags of texts that --check does not generate


def add_quality(quality: argparse.ArgumentParser) -> None:
    add_measurement(quality, QualitySettings, access=True, html=True)
    quality.add_argument("--check", action="store_true", help="check the panel: human text against texts that cheat")


def run_quality(options: argparse.Namespace) -> int:
    from onesweep.loadtest.quality.check import run_check
    from onesweep.loadtest.quality.report import check_page, interval_table, quality_page, quality_table, reasons
    from onesweep.loadtest.quality.run import run_quality as quality
    from onesweep.loadtest.workload.caller import Access
    from onesweep.stages.signals import ends_cleanly

    if options.check and (given := next((flag for flag in NOT_CHECKED if getattr(options, flag)), None)):
        raise InputError(f"--check generates nothing: leave out --{given}")
    settings = from_flags(QualitySettings, options, access=Access.of(options))
    check_report_options(options, charts=False)
    with ends_cleanly():
        checked = run_check(settings) if options.check else None
        result = checked or quality(settings)
    print(quality_table(result.rows))
    if checked is None:
        print("\njudge bits a byte, with 95 % intervals over prompts:\n" + interval_table(result.rows))
    print(f"\n{result.sentence}")
    sentences = checked.sentences() if checked else []
    print("".join(f"{line}\n" for line in (*reasons(result.rows), *sentences)), end="")
    page = check_page if checked else quality_page
    write_report(options, result.record, lambda: page(result.record, result.rows))
    return int(checked is not None and not checked.holds)
