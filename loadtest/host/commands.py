"""The commands `onesweep bench WHAT` that measure this machine: their flags come from their settings."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.host import settings
from onesweep.stages.settings import add_flags, from_flags

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from onesweep.loadtest.host.benchmark import Benchmark

    Subparsers = _SubParsersAction[argparse.ArgumentParser]


# Name, settings, implementation and help. An implementation imports torch, so it is imported only when it runs.
COMMANDS = (
    ("overhead", settings.OverheadSettings, "overhead:OverheadBench", "latency over pure compute, on loopback"),
    ("memory", settings.MemorySettings, "memory:MemoryBench", "memory of a loaded block over an idle server"),
    (
        "stage",
        settings.StageSettings,
        "stage:StageBench",
        "one step of one part: backends against this machine's floor",
    ),
    ("losses", settings.LossSettings, "losses:LossBench", "backends and codecs: nats lost by an AR model, time saved"),
    (
        "batching",
        settings.BatchingSettings,
        "batching:BatchingBench",
        "many requests at once against a bare torch loop",
    ),
    ("audit", settings.AuditSettings, "audits:AuditBench", "how soon audits find a faulty host, and what they cost"),
    ("seeing", settings.TelemetrySettings, "telemetry:TelemetryBench", "cost of metrics, traces and JSON logs"),
    ("shapes", settings.ShapesSettings, "shapes:ShapesBench", "large shapes with random weights, stage by stage"),
    ("parity", settings.ParitySettings, "parity:ParityBench", "an imported model over hosts against transformers"),
)


def register_host_benches(benches: Subparsers) -> None:
    for name, kind, implementation, help in COMMANDS:
        parser = benches.add_parser(name, help=help)
        add_flags(parser, kind)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
        parser.set_defaults(run=partial(run_benchmark, kind, f"onesweep.loadtest.host.{implementation}"))


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
