"""The command `fuzz`."""

from __future__ import annotations

import argparse
import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.fuzz.settings import TARGETS, FuzzSettings, parse_targets
from stages.errors import InputError, ServiceError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

NEEDED = ("hypothesis", "fastapi", "uvicorn")


def register(subparsers: Subparsers) -> None:
    fuzz = subparsers.add_parser("fuzz", help="bad input on purpose, to a deployment that is started for it")
    fuzz.add_argument("--inputs", type=int, default=2000, metavar="N", help="over all targets (2000)")
    fuzz.add_argument("--seconds", type=float, default=600.0, metavar="S", help="end then at the latest (600)")
    fuzz.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed: the same kinds of inputs (0)")
    fuzz.add_argument("--targets", metavar="T,T", help=f"of {', '.join(TARGETS)} (all)")
    fuzz.add_argument("--json", type=Path, metavar="FILE", help="write the figures and findings there, too")
    fuzz.set_defaults(run=run_fuzz_command)


def run_fuzz_command(options: argparse.Namespace) -> int:
    from loadtest.destination import check_destination, write_json
    from serving.deployment import ends_cleanly

    settings = FuzzSettings(options.inputs, options.seconds, options.seed, tuple(parse_targets(options.targets)))
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InputError(f"`onesweep fuzz` needs {', '.join(missing)}: pip install 'onesweep[http,loadtest]'")
    if options.json:
        check_destination(options.json)
    from loadtest.fuzz.report import fuzz_notes, fuzz_record, fuzz_table
    from loadtest.fuzz.run import run_fuzz

    print("starting two hosts, two routers and a gateway ...", flush=True)
    with ends_cleanly():
        result = asyncio.run(run_fuzz(settings, lambda line: print(line, flush=True)))
    print(fuzz_table(result) + "\n" + "\n".join(fuzz_notes(result)))
    if options.json:
        write_json(options.json, fuzz_record(result))
    if result.findings:
        raise ServiceError(f"{len(result.findings)} findings, listed above")
    return 0
