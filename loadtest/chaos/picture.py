"""The time line: what happened to whom, what was answered, how long bytes were waited for, what memory did."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadtest.chaos.account import Fate, fate_of, longest_wait
from loadtest.chaos.run import ChaosResult
from loadtest.load.pictures import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#222222", "#9aa0a6"
FAULT_COLOURS = {
    "kill": "#d55e00",
    "freeze": "#0072b2",
    "cut": "#cc79a7",
    "garbage": "#e69f00",
    "restart": "#009e73",
    "router": "#222222",
    "flood": "#56b4e9",
}
OTHER_COLOUR = "#777777"
SLICE_S = 5.0
_NO_METADATA = ("Creator", "Date", "Format", "Type")


@dataclass(frozen=True)
class Panel:
    """One of the pictures that stand above each other, over the same seconds."""

    height: float
    draw: Callable[[Axes], None]


def time_line(result: ChaosResult) -> str:
    """An SVG element on a light ground of its own; text is drawn as paths."""
    panels = [
        Panel(2.2, lambda axes: _faults(axes, result)),
        Panel(1.1, lambda axes: _answers(axes, result)),
        Panel(1.4, lambda axes: _waits(axes, result)),
        Panel(1.1, lambda axes: _memory(axes, result)),
    ]
    spans = [
        (fault.begin_s - result.begin_s, fault.end_s - result.begin_s, FAULT_COLOURS.get(fault.kind, OTHER_COLOUR))
        for fault in result.happened
    ]
    last_s = max([result.end_s, *(answer.end_s for answer in result.answers)])
    return over_time(panels, spans, last_s - result.begin_s, 8.4)


def over_time(panels: Sequence[Panel], spans: Sequence[tuple[float, float, str]], seconds: float, height: float) -> str:
    """Panels over one time axis, as an SVG element.

    :param spans: begin, end and colour of what is shaded in all panels but the first.
    :param height: of all, in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "chaos", "font.size": 8.5}
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(style | dict.fromkeys(ink, INK)):
        figure = Figure(figsize=(10.5, height), layout="constrained", facecolor="white")
        rows = figure.subplots(len(panels), 1, sharex=True, height_ratios=[panel.height for panel in panels])
        for axes, panel in zip(rows, panels, strict=True):
            panel.draw(axes)
            axes.grid(True, axis="x", color=FAINT, alpha=0.3, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in rows[1:]:
            for begin_s, end_s, colour in spans:
                axes.axvspan(begin_s, end_s, color=colour, alpha=0.13, linewidth=0)
        rows[-1].set_xlabel("seconds of the run")
        rows[-1].set_xlim(0, seconds)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(_NO_METADATA))
    svg = file.getvalue()
    return shorter(svg[svg.index("<svg") :])


def _faults(axes: Axes, result: ChaosResult) -> None:
    """A row for each host, link and the router that something happened to."""
    names = sorted({fault.target for fault in result.happened}, key=lambda name: (" - " in name, name), reverse=True)
    for fault in result.happened:
        begin_s, end_s = fault.begin_s - result.begin_s, fault.end_s - result.begin_s
        row, colour = names.index(fault.target), FAULT_COLOURS.get(fault.kind, OTHER_COLOUR)
        axes.barh(row, max(end_s - begin_s, 1.0), left=begin_s, color=colour, height=0.62)
        if fault.sound_s is not None:
            until_s = fault.sound_s - result.begin_s
            axes.plot([end_s, until_s], [row, row], color=colour, linewidth=1.2, alpha=0.6)
        axes.annotate(fault.kind, (begin_s, row), (0, 6.5), textcoords="offset points", fontsize=6.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, max(len(names), 1) - 0.2)
    axes.set_title("faults; a thin line: until every host and link was usable again", fontsize=9, loc="left")


def _answers(axes: Axes, result: ChaosResult) -> None:
    """Answers a second, stacked by fate."""
    count = int((result.end_s - result.begin_s) / SLICE_S) + 1
    rates: dict[Fate, list[float]] = {fate: [0.0] * count for fate in Fate}
    for answer in result.answers:
        place = int((answer.end_s - result.begin_s) / SLICE_S)
        if 0 <= place < count:
            rates[fate_of(answer, result.texts)][place] += 1 / SLICE_S
    moments, below = [i * SLICE_S for i in range(count)], [0.0] * count
    for fate, colour in zip(Fate, (COLOURS[2], COLOURS[1], INK, FAINT, OTHER_COLOUR), strict=True):
        if any(rates[fate]):
            axes.bar(moments, rates[fate], SLICE_S, bottom=below, align="edge", color=colour, label=fate.value)
            below = [low + rate for low, rate in zip(below, rates[fate], strict=True)]
    axes.set_title(f"answers a second, in slices of {SLICE_S:g} s", fontsize=9, loc="left")
    axes.legend(**_above(len(Fate)))


def _waits(axes: Axes, result: ChaosResult) -> None:
    """The longest wait for a byte in each request of the steady load."""
    dots: dict[bool, list[tuple[float, float]]] = defaultdict(list)
    for answer in result.answers:
        if answer.first and answer.arrivals_s:
            end_s, wait_s = longest_wait(answer)
            dots[bool(answer.replays or answer.tries)].append((end_s - result.begin_s, wait_s))
    for moved, colour, words in ((False, FAINT, "undisturbed"), (True, COLOURS[1], "done again, wholly or in part")):
        if dots[moved]:
            axes.plot(*zip(*dots[moved], strict=True), "o", ms=2.2, color=colour, label=words, alpha=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("longest wait for a byte in each request, seconds", fontsize=9, loc="left")
    axes.legend(**_above(2))


def _memory(axes: Axes, result: ChaosResult) -> None:
    names = sorted({life.name for life in result.lives})
    colours = dict(zip(names, (*COLOURS, INK, FAINT), strict=False))
    for life in result.lives:
        moments = [at_s - result.begin_s for at_s in life.at_s]
        shown = f"_{life.name}" if life.name in _labels(axes) else life.name
        colour = colours.get(life.name, OTHER_COLOUR)
        axes.plot(moments, [kb / 1024 for kb in life.rss_kb], color=colour, linewidth=1, label=shown)
    axes.set_title("resident memory of each process, MB", fontsize=9, loc="left")
    axes.legend(**_above(len(names) or 1))


def _above(columns: int) -> dict[str, Any]:
    """Where a legend hides nothing."""
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "borderaxespad": 0.0}
    return {**place, "frameon": False, "ncols": columns, "fontsize": 7}


def shorter(svg: str) -> str:
    """A hundredth of a point is enough."""
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", svg)


def _labels(axes: Axes) -> list[str]:
    return [str(line.get_label()) for line in axes.lines]
