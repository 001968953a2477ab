"""The commands `onesweep bench WHAT` that measure this machine: their flags come from their settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.host import settings
from onesweep.stages.settings import add_flags, from_flags

if TYPE_CHECKING:
    from onesweep.loadtest.host.benchmark import Benchmark


def _adding(kind: type[Any], implementation: str) -> Callable[[argparse.ArgumentParser], None]:
    """The function that adds the options of a benchmark. Its implementation imports torch: only when it runs."""

    def add(parser: argparse.ArgumentParser) -> None:
        add_flags(parser, kind)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
        parser.set_defaults(run=partial(run_benchmark, kind, f"{__package__}.{implementation}"))

    return add


add_overhead = _adding(settings.OverheadSettings, "overhead:OverheadBench")
add_memory = _adding(settings.MemorySettings, "memory:MemoryBench")
add_stage = _adding(settings.StageSettings, "stage:StageBench")
add_losses = _adding(settings.LossSettings, "losses:LossBench")
add_batching = _adding(settings.BatchingSettings, "batching:BatchingBench")
add_audit = _adding(settings.AuditSettings, "audits:AuditBench")
add_shapes = _adding(settings.ShapesSettings, "shapes:ShapesBench")
add_parity = _adding(settings.ParitySettings, "parity:parity_bench")


def run_benchmark(kind: type[Any], implementation: str, options: argparse.Namespace) -> int:
    """Announce it, measure, print the table, and write the record where `--json` says."""
    from onesweep.loadtest.report.record import write_json
    from onesweep.stages.settings import check_destination
    from onesweep.stages.signals import ends_cleanly

    benchmark: Benchmark[Any, Any] = resolve_name(implementation)(from_flags(kind, options))
    benchmark.check()
    if options.json:
        check_destination(options.json)
    print(benchmark.announcement, flush=True)
    with ends_cleanly():
        result = benchmark.measure()
    print(benchmark.table(result))
    if options.json:
        write_json(options.json, benchmark.record(result))
    return 0 if benchmark.holds(result) else 1
