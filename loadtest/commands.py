"""The commands of the folders below, and `onesweep bench` over all benchmarks."""

from __future__ import annotations

import argparse
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from stages.errors import InputError
from stages.settings import flag

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

T = TypeVar("T")


def register(subparsers: Subparsers) -> None:
    from loadtest.faults import commands as chaos
    from loadtest.faults.commands import register_rounds_bench
    from loadtest.frontier import commands as frontier
    from loadtest.fuzz import commands as fuzz
    from loadtest.host.commands import register_host_benches
    from loadtest.host.idle import register_idle
    from loadtest.lab import commands as wan
    from loadtest.latency.commands import register_latency
    from loadtest.load import commands as load
    from loadtest.quality import commands as quality

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


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers of "1,3". Raises InputError."""
    try:
        return tuple(int(count) for count in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"{flag} {text!r} must be numbers such as 1,3") from None
