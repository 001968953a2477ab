"""The commands `onesweep quality` and `onesweep bench infill`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loadtest.quality.settings import InfillSettings, QualitySettings
from stages.errors import InputError
from stages.settings import add_flags, from_flags

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from loadtest.quality.check import CheckResult
    from loadtest.quality.run import QualityResult

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

S = TypeVar("S", bound=QualitySettings)
NOT_CHECKED = ("modes", "weights", "router", "temperatures")  # flags of texts that --check does not generate


def register(subparsers: Subparsers) -> None:
    quality = subparsers.add_parser(
        "quality",
        help="quality of each mode's text, beside human text",
        description="Figures of continuations of held-out text, one row for each mode and one for human text.",
    )
    _add_options(quality, QualitySettings)
    quality.add_argument("--check", action="store_true", help="check the panel: human text against texts that cheat")
    quality.set_defaults(run=run_quality_command)


def register_infill(benches: Subparsers) -> None:
    infill = benches.add_parser("infill", help="gaps in held-out text: filled with and without a look at what follows")
    _add_options(infill, InfillSettings)
    infill.set_defaults(run=run_infill_command)


def run_quality_command(options: argparse.Namespace) -> int:
    from loadtest.quality.check import run_check
    from loadtest.quality.report import check_page, interval_table, quality_page, quality_table, reasons
    from loadtest.quality.run import run_quality
    from loadtest.report.table import open_meter
    from serving.cli.deployment import ends_cleanly

    if options.check and (given := next((flag for flag in NOT_CHECKED if getattr(options, flag)), None)):
        raise InputError(f"--check generates nothing: leave out --{given}")
    settings = _settings(QualitySettings, options)
    result: QualityResult | CheckResult
    with ends_cleanly():
        if options.check:
            result = checked = run_check(settings, _command(), open_meter)
            page, sentences, holds = check_page, checked.sentences(), checked.holds
        else:
            result = run_quality(settings, _command(), open_meter)
            page, sentences, holds = quality_page, [], True
    print(quality_table(result.rows))
    if not options.check:
        print("\njudge bits a byte, with 95 % intervals over prompts:\n" + interval_table(result.rows))
    print(f"\n{result.judged.sentence(settings)}")
    print("".join(f"{line}\n" for line in (*reasons(result.rows), *sentences)), end="")
    record = result.record()
    _write(options, record, page(record) if options.html else "")
    return int(not holds)


def run_infill_command(options: argparse.Namespace) -> int:
    from loadtest.quality.infill import run_infill
    from loadtest.quality.report import infill_page, infill_table
    from loadtest.report.table import open_meter
    from serving.cli.deployment import ends_cleanly

    if options.lengths == ():
        raise InputError("--lengths is empty: name one or more, such as 4,8,16")
    settings = _settings(InfillSettings, options)
    with ends_cleanly():
        result = run_infill(settings, _command(), open_meter)
    print(infill_table(result.rows))
    print(f"\n{settings.count} gaps of each length, {settings.prompt_bytes} bytes before them; judge {result.judge}")
    record = result.record()
    _write(options, record, infill_page(record, result.rows) if options.html else "")
    return 0


def _add_options(parser: argparse.ArgumentParser, settings: type[QualitySettings]) -> None:
    from loadtest.workload.caller import add_access_options

    add_flags(parser, settings)
    add_access_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with samples there")


def _settings(kind: type[S], options: argparse.Namespace) -> S:
    """Raises InputError, for a file that could not be written, too."""
    from loadtest.workload.caller import Access
    from stages.settings import check_destination

    settings = from_flags(kind, options, access=Access.of(options))
    for path, flag in ((options.json, "--json"), (options.html, "--html")):
        if path:
            check_destination(path, flag)
    return settings


def _write(options: argparse.Namespace, record: dict[str, object], page: str) -> None:
    from loadtest.report.record import write_json
    from stages.settings import write_destination

    if options.json:
        write_json(options.json, record)
    if options.html:
        write_destination(options.html, page)


def _command() -> str:
    return shlex.join(["onesweep", *sys.argv[1:]])
