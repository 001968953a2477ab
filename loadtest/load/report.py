"""Results of the load test: the table, notes below it, and records for JSON."""

import os
from dataclasses import asdict
from typing import Any

from onesweep.loadtest.load.run import Climb, LoadResult
from onesweep.loadtest.report.table import Column, Table, number, text_column


def _counted(name: str) -> Column[LoadResult]:
    return name, lambda result: str(getattr(result.figures.counts, name))


def _measured(title: str, name: str, digits: int = 1) -> Column[LoadResult]:
    return title, lambda result: number(getattr(result.figures, name), digits)


RUNS: Table[LoadResult] = Table(
    (
        *map(text_column, ("mode", "users")),
        *map(_counted, ("requests", "right", "refused", "failed", "lost", "wrong")),
        _measured("rps", "throughput_rps", 2),
        _measured("bytes/s", "output_bytes_per_s", 0),
        _measured("p50 ms", "p50_ms"),
        _measured("p95 ms", "p95_ms"),
        _measured("p99 ms", "p99_ms"),
        _measured("refused p95 ms", "refusal_p95_ms"),
        _measured("generator", "generator_cores", 2),  # its share of one core
    )
)


def run_notes(result: LoadResult) -> list[str]:
    """Sentences about what the table has no room for."""
    f, o = result.figures, result.figures.outside
    outside = f"{o.refused} refused, {o.failed} failed, {o.lost} lost, {o.wrong} wrong"
    notes = [
        f"window {f.seconds:.1f} s; {o.requests} requests began outside it ({outside})",
        f"texts compared with those of {result.texts}",
        f"the load generator took {f.generator_cores:.2f} of one of {os.cpu_count()} cores",
    ]
    if f.counts.refused:
        notes.append(
            f"refusals came after {number(f.refusal_p50_ms)} ms (p50), {number(f.refusal_p95_ms)} ms (p95) "
            f"and said to come back in {number(f.retry_after_ms)} ms"
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


def knee_note(climb: Climb) -> str:
    """The end of a climb in a sentence."""
    result = climb.knee_result
    if result is None:
        return f"{climb.mode}: no knee: {climb.ended}"
    found = "knee at" if climb.ended else "no knee up to"
    end = f"; with {climb.results[-1].users}: {climb.ended}" if climb.ended else ""
    return f"{climb.mode}: {found} {_figures(result)}{end}"


def over_note(knee: LoadResult, over: LoadResult) -> str:
    """The share of the knee's right answers with many more users, in a sentence."""
    f = over.figures
    refused = (
        f"{f.counts.refused} refusals, p95 {number(f.refusal_p95_ms)} ms"
        if f.counts.refused
        else "nobody was refused: the router takes as many requests at once (its --max-requests)"
    )
    return f"{over.mode}: {over.users} users get {100 * over.goodput(knee):.0f} % of that; {refused}"


def _figures(result: LoadResult) -> str:
    f = result.figures
    return (
        f"{result.users} user{'s' * (result.users > 1)}: {f.throughput_rps:.2f} right answers a second, "
        f"p95 {number(f.p95_ms)} ms"
    )


def run_record(result: LoadResult) -> dict[str, Any]:
    """Flat: `throughput_rps`, `p50_ms`, ..., `refused`, `failed`, `lost`, `wrong`, and what else was measured."""
    figures = asdict(result.figures)
    counts = figures.pop("counts")
    return {"mode": result.mode, "users": result.users, **counts, **figures, "texts": result.texts}
