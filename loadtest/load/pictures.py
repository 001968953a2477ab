"""Pictures as SVG text, made with matplotlib (extra `plots`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from loadtest.load.accounting import Judged, LoadFigures, percentile
from loadtest.load.knee import Climb
from loadtest.load.sample import Outcome
from stages.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
MARKS = ("o", "s", "^", "D", "v", "P")
SLICES = 30
"""Points along the window."""
BINS = 40


def check_matplotlib() -> None:
    """Raises InputError with what to install."""
    if find_spec("matplotlib") is None:
        raise InputError("--html needs matplotlib: pip install 'onesweep[plots]', or leave --html out")


def knee_picture(climbs: Sequence[Climb]) -> str:
    """Latency against throughput, a line for each mode, its knee ringed; numbers are users."""
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    figure = _figure(8.0, 5.0)
    axes = figure.add_subplot(xscale="log", yscale="log")
    for climb, colour, mark in zip(climbs, COLOURS, MARKS, strict=False):
        shown = [(r, r.figures.p95_ms) for r in climb.results if r.figures.p95_ms and r.figures.throughput_rps]
        if not shown:
            continue
        rates = [result.figures.throughput_rps for result, _ in shown]
        axes.plot(rates, [p95 for _, p95 in shown], marker=mark, color=colour, label=f"{climb.mode}, p95")
        axes.plot(rates, [r.figures.p50_ms or 0.0 for r, _ in shown], ":", color=colour, label=f"{climb.mode}, p50")
        for result, p95 in shown:
            axes.annotate(
                str(result.users),
                (result.figures.throughput_rps, p95),
                (5, 5),
                textcoords="offset points",
                color=colour,
            )
            if result.users == climb.knee:
                axes.plot(result.figures.throughput_rps, p95, "o", ms=14, mfc="none", color=colour)
    axes.set_xlabel("right answers a second")
    axes.set_ylabel("latency, ms")
    for axis in (axes.xaxis, axes.yaxis):  # 200, not 2 x 10^2
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.grid(True, which="both", alpha=0.2)
    if axes.lines:
        axes.legend(frameon=False)
    return _svg(figure, "knee")


def latency_picture(figures: LoadFigures, judged: Sequence[Judged]) -> str:
    """Two panels: how latencies of right answers are spread, and how they went along the window."""
    figure = _figure(10.0, 4.0)
    left, right = figure.subplots(1, 2)
    inside = [j for j in judged if 0 <= j.begin_s < figures.seconds]
    answers = [j for j in inside if j.outcome is Outcome.RIGHT]
    if answers:
        left.hist([j.latency_ms for j in answers], bins=BINS, color=COLOURS[0], alpha=0.6)
    for name, value, colour in (
        ("p50", figures.p50_ms, COLOURS[0]),
        ("p95", figures.p95_ms, COLOURS[1]),
        ("p99", figures.p99_ms, COLOURS[3]),
    ):
        if value is not None:
            left.axvline(value, color=colour, label=f"{name} {value:.0f} ms")
    left.set_xlabel("latency, ms")
    left.set_ylabel("requests")
    _draw_course(right, figures.seconds, answers, [j for j in inside if j.outcome is not Outcome.RIGHT])
    for axes in (left, right):
        axes.grid(True, alpha=0.2)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    return _svg(figure, "latency")


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
        (Outcome.REFUSED, Outcome.FAILED, Outcome.LOST, Outcome.WRONG), COLOURS[2:], MARKS[2:], strict=False
    ):
        chosen = [j for j in others if j.outcome is outcome]
        if chosen:
            moments, values = [j.begin_s for j in chosen], [j.latency_ms for j in chosen]
            axes.plot(moments, values, mark, ms=3, color=colour, label=outcome.value)
    axes.set_xlabel("the request began, seconds into the window")
    axes.set_ylabel("latency, ms")
    axes.set_ylim(bottom=0)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, name: str) -> str:
    """The bare element, with ids that no other picture of the page has."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<!DOCTYPE")[2].partition(">")[2].strip()
