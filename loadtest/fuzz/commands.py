"""The command `fuzz` and its settings."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import InputError, ServiceError
from stages.settings import add_flags, flag, from_flags

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

NEEDED = ("hypothesis", "fastapi", "uvicorn")
WIRE = ("stage", "router", "answers", "answered", "http", "training")  # targets that are reached over sockets
INSIDE = ("admission", "host", "files")  # targets in this process
TARGETS = (*WIRE, *INSIDE)


@dataclass(frozen=True)
class FuzzSettings:
    """Settings of `onesweep fuzz`. Raises InputError."""

    inputs: int = field(default=2000, metadata=flag("Inputs over all targets", least=1, most=10_000_000))
    seconds: float = field(
        default=600.0, metadata=flag("End then at the latest, in seconds", metavar="S", above=0, most=86_400)
    )
    seed: int = field(
        default=0,
        metadata=flag("Seed for the inputs", metavar="S", least=0, most=(1 << 32) - 1),
    )
    targets: tuple[str, ...] = field(
        default=TARGETS, metadata=flag(f"Targets, of {', '.join(TARGETS)}", shown="all", metavar="T,T")
    )
    json: Path | None = field(default=None, metadata=flag("Write the figures and findings there, too"))

    def __post_init__(self) -> None:
        for target in self.targets:
            if target not in TARGETS:
                raise InputError(f"there is no target {target!r}; choose from {', '.join(TARGETS)}")
        if len(set(self.targets)) < len(self.targets):
            raise InputError(f"--targets {','.join(self.targets)} names one twice")


def register(subparsers: Subparsers) -> None:
    fuzz = subparsers.add_parser("fuzz", help="bad input on purpose, to a deployment that is started for it")
    add_flags(fuzz, FuzzSettings)
    fuzz.set_defaults(run=run_fuzz_command)


def run_fuzz_command(options: argparse.Namespace) -> int:
    from loadtest.report.record import write_json
    from serving.cli.deployment import ends_cleanly
    from stages.settings import check_destination

    settings = from_flags(FuzzSettings, options)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InputError(f"`onesweep fuzz` needs {', '.join(missing)}: pip install 'onesweep[http,loadtest]'")
    if settings.json:
        check_destination(settings.json)
    from loadtest.fuzz.run import fuzz_notes, fuzz_record, fuzz_table, run_fuzz

    print("starting two hosts, two routers and a gateway ...", flush=True)
    with ends_cleanly():
        result = asyncio.run(run_fuzz(settings, lambda line: print(line, flush=True)))
    print(fuzz_table(result) + "\n" + "\n".join(fuzz_notes(result)))
    if settings.json:
        write_json(settings.json, fuzz_record(result))
    if result.findings:
        raise ServiceError(f"{len(result.findings)} findings, listed above")
    return 0
