"""A run, or a climb to the knee, for a terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence

from loadtest.load.accounting import LoadFigures
from loadtest.load.knee import Climb
from loadtest.load.run import LoadResult
from loadtest.table import aligned

HEADER = (
    *("mode", "users", "requests", "right", "refused", "failed", "lost", "wrong"),
    *("rps", "bytes/s", "p50 ms", "p95 ms", "p99 ms", "refused p95 ms", "generator"),
)


def row(result: LoadResult) -> tuple[str, ...]:
    """Cells under HEADER; `generator` is the load generator's share of one core."""
    f, c = result.figures, result.figures.counts
    return (
        *(result.mode, str(result.users)),
        *(str(number) for number in (c.requests, c.right, c.refused, c.failed, c.lost, c.wrong)),
        *(f"{f.throughput_rps:.2f}", f"{f.output_bytes_per_s:.0f}"),
        *(milliseconds(value) for value in (f.p50_ms, f.p95_ms, f.p99_ms, f.refusal_p95_ms)),
        f"{f.generator_cores:.2f}",
    )


def run_table(results: Sequence[LoadResult]) -> str:
    return aligned(HEADER, [row(result) for result in results])


def run_notes(result: LoadResult) -> list[str]:
    """What the table has no room for, a sentence a line."""
    f = result.figures
    notes = [
        f"window {f.seconds:.1f} s; {_outside(f)}",
        f"texts compared with those of {result.texts}",
        f"the load generator took {f.generator_cores:.2f} of one of {os.cpu_count()} cores",
    ]
    if f.counts.refused:
        notes.append(
            f"refusals came after {milliseconds(f.refusal_p50_ms)} ms (p50), {milliseconds(f.refusal_p95_ms)} ms (p95) "
            f"and said to come back in {milliseconds(f.retry_after_ms)} ms"
        )
    if f.counts.cut:
        notes.append(f"{f.counts.cut} requests were open when the run was stopped: nothing can be said of them")
    if f.p95_ms is not None and f.p95_ms / 1000 > f.seconds / 2:
        notes.append("the window is shorter than two requests: a longer one (--seconds) gives better figures")
    notes += [f"failed {count} x: {failure}" for failure, count in f.failures.items()]
    if result.wrong:
        notes.append(f"wrong text: {result.wrong}")
    return notes


def run_line(result: LoadResult) -> str:
    """A run in a few words, while others are still to come."""
    trouble = result.figures.counts.trouble + result.figures.outside.trouble
    return f"{result.mode}, {_figures(result)}" + (f", {trouble} failed, lost or wrong" if trouble else "")


def knee_notes(climbs: Sequence[Climb]) -> list[str]:
    """A sentence for each mode."""
    return [_knee(climb) for climb in climbs]


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _knee(climb: Climb) -> str:
    result = climb.knee_result
    if result is None:
        return f"{climb.mode}: no knee: {climb.ended}"
    found = "knee at" if climb.ended else "no knee up to"
    end = f"; with {climb.results[-1].users}: {climb.ended}" if climb.ended else ""
    return f"{climb.mode}: {found} {_figures(result)}{end}"


def _figures(result: LoadResult) -> str:
    f = result.figures
    return (
        f"{result.users} user{'s' * (result.users > 1)}: {f.throughput_rps:.2f} right answers a second, "
        f"p95 {milliseconds(f.p95_ms)} ms"
    )


def _outside(f: LoadFigures) -> str:
    o = f.outside
    counts = f"{o.refused} refused, {o.failed} failed, {o.lost} lost, {o.wrong} wrong"
    return f"{o.requests} requests began outside it ({counts})"
