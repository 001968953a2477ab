"""Results of the load test: tables and notes for a terminal, a page with charts, records for JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.load.accounting import Judged, LoadFigures
from onesweep.loadtest.load.plan import Outcome
from onesweep.loadtest.load.run import Climb, LoadResult, LoadRun
from onesweep.loadtest.report.chart import COLOURS, MARKERS, draw_chart, grid
from onesweep.loadtest.report.page import bullets, figure, html_page, html_pairs, shown
from onesweep.loadtest.report.table import Column, Table, number, percentile, text_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SLICES = 30  # points along the window
BINS = 40  # of the histogram


def knee_picture(climbs: Sequence[Climb]) -> str:
    """Latency against throughput, a line for each mode, its knee ringed; numbers are users."""
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xscale="log", yscale="log")
        for climb, colour, mark in zip(climbs, COLOURS, MARKERS, strict=False):
            _draw_climb(axes, climb, colour, mark)
        axes.set_xlabel("right answers a second")
        axes.set_ylabel("latency, ms")
        for axis in (axes.xaxis, axes.yaxis):  # 200, not 2 x 10^2
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        grid(axes, which="both")
        if axes.lines:
            axes.legend(frameon=False)

    return draw_chart(draw, "knee", 8.0, 5.0)


def _draw_climb(axes: Axes, climb: Climb, colour: str, mark: str) -> None:
    shown = [(r, r.figures.p95_ms) for r in climb.results if r.figures.p95_ms and r.figures.throughput_rps]
    if not shown:
        return
    rates = [result.figures.throughput_rps for result, _ in shown]
    axes.plot(rates, [p95 for _, p95 in shown], marker=mark, color=colour, label=f"{climb.mode}, p95")
    axes.plot(rates, [r.figures.p50_ms or 0.0 for r, _ in shown], ":", color=colour, label=f"{climb.mode}, p50")
    for result, p95 in shown:
        at = (result.figures.throughput_rps, p95)
        axes.annotate(str(result.users), at, (5, 5), textcoords="offset points", color=colour)
        if result.users == climb.knee:
            axes.plot(*at, "o", ms=14, mfc="none", color=colour)


def latency_panels(figures: LoadFigures, judged: Sequence[Judged]) -> str:
    """Two panels: how latencies of right answers are spread, and how they went along the window."""
    inside = [j for j in judged if 0 <= j.begin_s < figures.seconds]
    answers = [j for j in inside if j.outcome is Outcome.RIGHT]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        if answers:
            left.hist([j.latency_ms for j in answers], bins=BINS, color=COLOURS[0], alpha=0.6)
        percentiles = (("p50", figures.p50_ms, 0), ("p95", figures.p95_ms, 1), ("p99", figures.p99_ms, 3))
        for name, value, colour in percentiles:
            if value is not None:
                left.axvline(value, color=COLOURS[colour], label=f"{name} {value:.0f} ms")
        left.set_xlabel("latency, ms")
        left.set_ylabel("requests")
        _draw_course(right, figures.seconds, answers, [j for j in inside if j.outcome is not Outcome.RIGHT])
        for axes in (left, right):
            grid(axes)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False)

    return draw_chart(draw, "latency")


def _draw_course(axes: Axes, seconds: float, answers: Sequence[Judged], others: Sequence[Judged]) -> None:
    width = seconds / SLICES
    slices: list[list[float]] = [[] for _ in range(SLICES)]
    for judged in answers:
        slices[min(int(judged.begin_s / width), SLICES - 1)].append(judged.latency_ms)
    filled = [(i, sorted(latencies)) for i, latencies in enumerate(slices) if latencies]
    moments = [(i + 0.5) * width for i, _ in filled]
    for percent, colour, mark in ((50, COLOURS[0], "o"), (95, COLOURS[1], "s")):
        values = [percentile(latencies, percent) or 0.0 for _, latencies in filled]
        axes.plot(moments, values, marker=mark, ms=3, color=colour, label=f"p{percent}")
    for outcome, colour, mark in zip(
        (Outcome.REFUSED, Outcome.FAILED, Outcome.LOST, Outcome.WRONG), COLOURS[2:], MARKERS[2:], strict=False
    ):
        chosen = [j for j in others if j.outcome is outcome]
        if chosen:
            moments, values = [j.begin_s for j in chosen], [j.latency_ms for j in chosen]
            axes.plot(moments, values, mark, ms=3, color=colour, label=outcome.value)
    axes.set_xlabel("the request began, seconds into the window")
    axes.set_ylabel("latency, ms")
    axes.set_ylim(bottom=0)


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
    f = result.figures
    notes = [
        f"window {f.seconds:.1f} s; {_outside(f)}",
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


def knee_notes(climbs: Sequence[Climb]) -> list[str]:
    """A sentence for each mode."""
    return [_knee(climb) for climb in climbs]


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
        f"p95 {number(f.p95_ms)} ms"
    )


def _outside(f: LoadFigures) -> str:
    o = f.outside
    counts = f"{o.refused} refused, {o.failed} failed, {o.lost} lost, {o.wrong} wrong"
    return f"{o.requests} requests began outside it ({counts})"


def load_page(scene: LoadRun, result: LoadResult) -> str:
    """The report of one run."""
    picture = latency_panels(result.figures, result.judged)
    return _page(f"{result.users} users of {result.mode}", picture, [result], run_notes(result), scene)


def knee_page(scene: LoadRun, climbs: Sequence[Climb]) -> str:
    """The report of a climb to the knee, all modes in one picture."""
    results = [result for climb in climbs for result in climb.results]
    return _page("latency against throughput", knee_picture(climbs), results, knee_notes(climbs), scene)


def _page(title: str, picture: str, results: Sequence[LoadResult], notes: Sequence[str], scene: LoadRun) -> str:
    title, record = f"onesweep load test: {title}", scene.record()
    parts = [
        f"<h1>{shown(title)}</h1>",
        figure(picture),
        RUNS.html(results),
        bullets(notes),
        "<h2>Settings</h2>",
        html_pairs({**record, **record.pop("machine")}),
    ]
    return html_page(title, parts)


def run_record(result: LoadResult) -> dict[str, Any]:
    """Flat: `throughput_rps`, `p50_ms`, ..., `refused`, `failed`, `lost`, `wrong`, and what else was measured."""
    figures = asdict(result.figures)
    counts = figures.pop("counts")
    return {"mode": result.mode, "users": result.users, **counts, **figures, "texts": result.texts}


def load_record(scene: LoadRun, result: LoadResult) -> dict[str, Any]:
    """One run."""
    return {"loadtest": "run", **run_record(result), **scene.record()}


def knee_record(scene: LoadRun, climbs: Sequence[Climb]) -> dict[str, Any]:
    """`rows`, one for each run, and `knees`, one for each mode."""
    return {
        "loadtest": "knee",
        "rows": [run_record(result) for climb in climbs for result in climb.results],
        "knees": [{"mode": climb.mode, "users": climb.knee, "ended": climb.ended} for climb in climbs],
        **scene.record(),
    }
