"""Commands that measure: `bench overhead`, `bench memory`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stages.errors import InputError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


def register(subparsers: Subparsers) -> None:
    from serving.commands import SHIPPED

    bench = subparsers.add_parser("bench", help="measure what serving costs on this machine")
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)

    overhead = benches.add_parser("overhead", help="latency over pure compute, on loopback")
    overhead.add_argument("--checkpoint", type=Path, default=SHIPPED, metavar="DIR", help="default: shipped weights")
    overhead.add_argument("--requests", type=int, default=20, metavar="R", help="requests of each mode (20)")
    overhead.add_argument("--bytes", type=int, default=128, metavar="N", help="bytes to generate (128)")
    overhead.add_argument("--hosts", default="", metavar="H[,H]", help="hosts that share the blocks (1,3)")
    overhead.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    overhead.set_defaults(run=run_overhead)

    memory = benches.add_parser("memory", help="what a loaded block takes over an idle server")
    memory.add_argument("--block-mb", type=int, default=200, metavar="MB", help="size of the block, about (200)")
    memory.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    memory.set_defaults(run=run_memory)


def run_overhead(options: argparse.Namespace) -> int:
    from loadtest.destination import check_destination, write_json
    from loadtest.overhead import OverheadSettings, check_settings, measure_overhead, overhead_record, overhead_table

    checkpoint = options.checkpoint.resolve()
    settings = OverheadSettings(checkpoint, _host_counts(options.hosts), options.requests, options.bytes)
    if options.json:
        check_destination(options.json)
    check_settings(settings)
    print(f"{settings.requests} requests of each mode, {settings.max_bytes} bytes each ...", flush=True)
    figures = list(measure_overhead(settings))
    print(overhead_table(figures))
    if options.json:
        write_json(options.json, overhead_record(settings, figures))
    return 0


def run_memory(options: argparse.Namespace) -> int:
    from loadtest.destination import check_destination, write_json
    from loadtest.memory import measure_memory, memory_record, memory_table

    if options.block_mb < 1:
        raise InputError(f"--block-mb must be at least 1, not {options.block_mb}")
    if options.json:
        check_destination(options.json)
    print(f"writing a block of about {options.block_mb} MB, starting two servers ...", flush=True)
    figures = measure_memory(options.block_mb)
    print(memory_table(figures))
    if options.json:
        write_json(options.json, memory_record(figures))
    return 0


def _host_counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(count) for count in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--hosts {text!r} must be numbers such as 1,3") from None
