"""The command `onesweep quality`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import InputError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from loadtest.quality.run import Ground, QualitySettings

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register(subparsers: Subparsers) -> None:
    from loadtest.load.access import add_access_options

    quality = subparsers.add_parser(
        "quality",
        help="what each mode's text is worth, beside human text",
        description="Figures of continuations of held-out text, one row for each mode and one for human text.",
    )
    quality.add_argument("--prompts", type=Path, required=True, metavar="PATH", help="held-out text: a file or folder")
    quality.add_argument(
        "--modes",
        metavar="M[,M]",
        help="with settings: sweep:steps=16, chunked:chunk=32, resample:ar:chunk=32:candidates=64 (all served)",
    )
    quality.add_argument("--count", type=int, default=100, metavar="N", help="prompts (100)")
    quality.add_argument("--bytes", type=int, default=256, metavar="N", help="bytes to generate (256)")
    quality.add_argument("--prompt-bytes", type=int, default=64, metavar="N", help="bytes of a prompt (64)")
    quality.add_argument("--judge", metavar="NAME", help="smollm2-135m, ngram (the first that is installed)")
    quality.add_argument("--train", type=Path, metavar="PATH", help="training text (train.txt beside the prompts)")
    quality.add_argument("--temperatures", default="", metavar="T[,T]", help="a row for each, and bits between them")
    quality.add_argument("--seed", type=int, default=0, metavar="S", help="shifts the prompts; prompt i has S + i (0)")
    quality.add_argument("--weights", type=Path, metavar="DIR", help="bundle to serve (the shipped weights)")
    add_access_options(quality)
    quality.add_argument("--in-flight", type=int, default=8, metavar="N", help="requests at once (8)")
    quality.add_argument("--check", action="store_true", help="check the panel: human text against texts that cheat")
    quality.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    quality.add_argument("--html", type=Path, metavar="FILE", help="write a report with samples there")
    quality.set_defaults(run=run_quality_command)


def run_quality_command(options: argparse.Namespace) -> int:
    from loadtest.destination import check_destination, write_json
    from loadtest.page import write_page
    from loadtest.quality.page import check_page, quality_page
    from serving.deployment import ends_cleanly

    settings = _settings(options)
    for path, flag in ((options.json, "--json"), (options.html, "--html")):
        if path:
            check_destination(path, flag)
    command = shlex.join(["onesweep", *sys.argv[1:]])
    with ends_cleanly():
        return_code, result = (_check if options.check else _run)(settings, command)
    if options.json:
        write_json(options.json, result.record())
    if options.html:
        write_page(options.html, (check_page if options.check else quality_page)(result.record()))
    return return_code


def _run(settings: QualitySettings, command: str) -> tuple[int, Any]:
    from loadtest.meter import open_meter
    from loadtest.quality.run import run_quality
    from loadtest.quality.table import interval_table, quality_table, reasons

    result = run_quality(settings, command, open_meter)
    print(quality_table(result.rows))
    print("\njudge bits a byte, with 95 % intervals over prompts:\n" + interval_table(result.rows))
    _print_ground(result.ground, settings)
    print("".join(f"{line}\n" for line in reasons(result.rows)), end="")
    return 0, result


def _check(settings: QualitySettings, command: str) -> tuple[int, Any]:
    from loadtest.meter import open_meter
    from loadtest.quality.check import run_check
    from loadtest.quality.table import quality_table, reasons

    result = run_check(settings, command, open_meter)
    print(quality_table(result.rows))
    _print_ground(result.ground, settings)
    print("".join(f"{line}\n" for line in (*reasons(result.rows), *result.sentences())), end="")
    return int(not result.holds), result


def _print_ground(ground: Ground, settings: QualitySettings) -> None:
    what = "no training text"
    if ground.training is not None:
        source = "training text" if ground.known_training else "text between the prompts, for want of training text"
        what = f"n-gram model and words from {len(ground.training.raw):,} bytes of {source}"
    print(
        f"\n{settings.count} prompts of {settings.prompt_bytes} bytes, {settings.max_bytes} bytes each; "
        f"{len(ground.prompts.reference)} other passages as the human reference; judge {ground.judge.name}; {what}"
    )


def _settings(options: argparse.Namespace) -> QualitySettings:
    from loadtest.load.access import Access
    from loadtest.quality.arm import parse_temperatures
    from loadtest.quality.run import QualitySettings

    if options.check:
        for flag in ("modes", "weights", "router", "temperatures"):
            if getattr(options, flag):
                raise InputError(f"--check generates nothing: leave out --{flag}")
    return QualitySettings(
        options.prompts,
        options.modes,
        options.count,
        options.bytes,
        options.prompt_bytes,
        options.judge,
        options.train,
        options.seed,
        options.weights.resolve() if options.weights else None,
        Access.of(options),
        parse_temperatures(options.temperatures) if options.temperatures else (),
        options.in_flight,
    )
