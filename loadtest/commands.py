"""The commands of the folders below, `onesweep bench` over all benchmarks, and what their registration shares."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onesweep.stages.errors import InputError
from onesweep.stages.settings import add_flags, flag

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

T = TypeVar("T")


def register(subparsers: Subparsers) -> None:
    from onesweep.loadtest.faults import commands as chaos
    from onesweep.loadtest.faults.commands import register_rounds_bench
    from onesweep.loadtest.frontier import commands as frontier
    from onesweep.loadtest.fuzz import commands as fuzz
    from onesweep.loadtest.host.commands import register_host_benches
    from onesweep.loadtest.host.idle import register_idle
    from onesweep.loadtest.lab import commands as wan
    from onesweep.loadtest.latency.commands import register_latency
    from onesweep.loadtest.load import commands as load
    from onesweep.loadtest.quality import commands as quality

    load.register(subparsers)
    wan.register(subparsers)
    quality.register(subparsers)
    frontier.register(subparsers)
    chaos.register(subparsers)
    fuzz.register(subparsers)

    bench = subparsers.add_parser("bench", help="measure what serving costs on this machine")
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)

    register_host_benches(benches)
    register_idle(benches)
    register_latency(benches)
    quality.register_infill(benches)
    register_rounds_bench(benches)


def setting(default: T, help: str, **more: Any) -> T:  # noqa: ANN401 - of `flag`
    """A field of a settings dataclass with a flag."""
    made: T = field(default=default, metadata=flag(help, **more))
    return made


def add_measurement(
    subparsers: Subparsers,
    name: str,
    settings: type[Any],
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str | None = None,
    access: bool = False,
    html: bool = False,
    svg: bool = False,
) -> argparse.ArgumentParser:
    """A command whose flags come from its settings, and which writes a record with `--json`.

    :param access: with `--router` and the options of a connection to a deployment that is there.
    """
    # here and not above: settings import this module for their flags
    from onesweep.loadtest.report.record import add_report_options
    from onesweep.loadtest.workload.caller import add_access_options

    command = subparsers.add_parser(name, help=help, description=description)
    add_flags(command, settings)
    if access:
        add_access_options(command)
    add_report_options(command, html=html, svg=svg)
    command.set_defaults(run=run)
    return command


def say(text: str) -> None:
    """Print a line at once, also where the output is a pipe."""
    print(text, flush=True)


def absolute(text: str) -> Path:
    """A path that still holds when a server with another working directory reads it."""
    return Path(text).resolve()


CHECKPOINT = flag("default: shipped weights", metavar="DIR", shown="", type=absolute)


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers of "1,3". Raises InputError."""
    try:
        return tuple(int(count) for count in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"{flag} {text!r} must be numbers such as 1,3") from None
