"""Shared parts of the commands that measure: their options, and how they read and print."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from onesweep.stages.errors import InputError
from onesweep.stages.settings import add_flags, flag

N = TypeVar("N", int, float)


def add_measurement(
    command: argparse.ArgumentParser,
    settings: type[Any],
    *,
    only: Collection[str] | None = None,
    access: bool = False,
    html: bool = False,
    svg: bool = False,
) -> None:
    """Options of a command whose flags come from its settings, and which writes a record with `--json`.

    :param only: fields whose flags are added; None for all.
    :param access: with `--router` and the options of a connection to a deployment that is there.
    """
    # here and not above: settings import this module for their flags
    from onesweep.loadtest.report.record import add_report_options
    from onesweep.loadtest.workload.caller import add_access_options

    add_flags(command, settings, only)
    if access:
        add_access_options(command)
    add_report_options(command, html=html, svg=svg)


def say(text: str) -> None:
    """Print a line at once, also where the output is a pipe."""
    print(text, flush=True)


def absolute(text: str) -> Path:
    """A path that still holds when a server with another working directory reads it."""
    return Path(text).resolve()


CHECKPOINT = flag("default: shipped weights", metavar="DIR", shown="", type=absolute)


def numbers(text: str, flag: str, number: Callable[[str], N]) -> tuple[N, ...]:
    """Numbers of "1,3". Raises InputError."""
    try:
        return tuple(map(number, text.split(","))) if text else ()
    except ValueError:
        raise InputError(f"{flag} {text!r} must be numbers such as 1,3") from None
