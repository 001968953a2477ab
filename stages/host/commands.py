"""The command `inspect`, and options of the commands that import models or start hosts."""

import argparse
import json
import math
import sys
from pathlib import Path

from stages.errors import InputError
from stages.host.settings import HostSettings
from stages.limits import MAX_THREADS
from stages.settings import add_flags
from stages.signals import ends_at_once


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that imports a model."""
    parser.add_argument("--context", type=int, metavar="N", help="positions to keep (the model's, up to 8192)")
    what = "of layers: 4 bytes a number, 2 bytes, 8 bits or 4 (those of a rounded GGUF file, else float32)"
    parser.add_argument("--weights", choices=["float32", "bfloat16", "q8", "q4"], help=what)


def add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--verify", action="store_true", help="load everything: digests, shapes, loss gate")
    inspect.add_argument("--source", type=Path, metavar="MODEL", help="compare with transformers: its source")
    inspect.add_argument("--json", action="store_true", help="print JSON")


def run_inspect(options: argparse.Namespace) -> int:
    if (file := options.directory).is_file():
        is_own = file.name == "manifest.json"
        how = f"give its directory, {file.parent}" if is_own else f"`onesweep import {file} --out DIR` reads models"
        raise InputError(f"{file} is a file: {how}")
    with ends_at_once():
        from stages.checkpoint.inspect import describe, record, verify

    if options.source is not None:
        from stages.importing.parity import compare_with_source, require_source

        imported = require_source(options.directory, options.source)
    print(json.dumps(record(options.directory), indent=2) if options.json else describe(options.directory))
    beside = sys.stderr if options.json else sys.stdout
    checks = verify(options.directory) if options.verify else []
    for check in checks:
        print(check, file=beside)
    failed = sum(not check.ok for check in checks)
    if checks:
        print(f"{failed} of {len(checks)} failed" if failed else f"all {len(checks)} hold", file=beside)
    holds = not failed
    if options.source is not None:
        comparison = compare_with_source(*imported, options.source)
        print(comparison, file=beside)
        holds = holds and comparison.holds
    return 0 if holds else 1


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option of every command that starts hosts."""
    # None where it is not given: a topology may say where its hosts compute
    add_flags(parser, HostSettings, only=("device",))


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise InputError unless these options are above 0, and not absurd."""
    for name in names:
        value = getattr(options, name)
        flag = "--" + name.replace("_", "-")
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} must be above 0, not {value}")
        if value is not None and value > (most := {"threads": MAX_THREADS, "port": 65535}.get(name, math.inf)):
            raise InputError(f"{flag} must be at most {most}, not {value}")
