"""The commands `onesweep bench WHAT` that measure this machine: their flags come from their settings."""

import argparse
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.commands import add_measurement
from onesweep.loadtest.host import settings
from onesweep.stages.settings import from_flags

if TYPE_CHECKING:
    from onesweep.loadtest.host.benchmark import Benchmark


def _run(kind: type[Any], implementation: str, options: argparse.Namespace) -> int:
    """Announce it, measure, print the table, and write the record where `--json` says."""
    from onesweep.loadtest.report.record import check_report_options, write_report
    from onesweep.stages.signals import ends_cleanly

    benchmark: Benchmark[Any, Any] = resolve_name(f"{__package__}.{implementation}")(from_flags(kind, options))
    benchmark.check()
    check_report_options(options)
    print(benchmark.announcement, flush=True)
    with ends_cleanly():
        result = benchmark.measure()
    print(benchmark.table(result))
    write_report(options, benchmark.record(result))
    return 0 if benchmark.holds(result) else 1


def _functions(
    kind: type[Any], implementation: str
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    """A benchmark's functions. Its implementation imports torch: only when it runs."""
    return partial(add_measurement, settings=kind), partial(_run, kind, implementation)


add_overhead, run_overhead = _functions(settings.OverheadSettings, "overhead:OverheadBench")
add_memory, run_memory = _functions(settings.MemorySettings, "memory:MemoryBench")
add_stage, run_stage = _functions(settings.StageSettings, "stage:StageBench")
add_losses, run_losses = _functions(settings.LossSettings, "losses:LossBench")
add_leak, run_leak = _functions(settings.LeakSettings, "leak:LeakBench")
add_batching, run_batching = _functions(settings.BatchingSettings, "batching:BatchingBench")
add_audit, run_audit = _functions(settings.AuditSettings, "audits:AuditBench")
add_shapes, run_shapes = _functions(settings.ShapesSettings, "shapes:ShapesBench")
add_parity, run_parity = _functions(settings.ParitySettings, "parity:parity_bench")
