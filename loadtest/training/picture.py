"""The time line: what happened to whom, what was accepted, and how far each part came."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from loadtest.chaos.picture import FAINT, INK, shorter
from loadtest.load.pictures import COLOURS
from loadtest.training.run import TrainingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAULT_COLOURS = {
    "kill": "#d55e00",
    "freeze": "#0072b2",
    "cut": "#cc79a7",
    "twin": "#009e73",
    "old-state": "#56b4e9",
    "coordinator": "#222222",
    "disk": "#777777",
}
LIE_COLOUR = "#e69f00"
HEIGHTS = (2.2, 1.6, 1.4)
_NO_METADATA = ("Creator", "Date", "Format", "Type")


def time_line(result: TrainingResult) -> str:
    """An SVG element on a light ground of its own; text is drawn as paths."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "chaos", "font.size": 8.5}
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(style | dict.fromkeys(ink, INK)):
        figure = Figure(figsize=(10.5, 7.0), layout="constrained", facecolor="white")
        rows = figure.subplots(3, 1, sharex=True, height_ratios=HEIGHTS)
        _faults(rows[0], result)
        _accepted(rows[1], result)
        _versions(rows[2], result)
        for axes in rows:
            axes.grid(True, axis="x", color=FAINT, alpha=0.3, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in rows[1:]:
            for fault in result.happened:
                span = (fault.begin_s - result.begin_s, fault.end_s - result.begin_s)
                axes.axvspan(*span, color=FAULT_COLOURS.get(fault.kind, LIE_COLOUR), alpha=0.13, linewidth=0)
        rows[-1].set_xlabel("seconds of the run")
        rows[-1].set_xlim(0, result.end_s - result.begin_s)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(_NO_METADATA))
    svg = file.getvalue()
    return shorter(svg[svg.index("<svg") :])


def _faults(axes: Axes, result: TrainingResult) -> None:
    """A row for each worker and the coordinator; a thin line until its next update was accepted."""
    names = sorted({fault.target for fault in result.happened}, reverse=True)
    for fault in result.happened:
        begin_s, end_s = fault.begin_s - result.begin_s, fault.end_s - result.begin_s
        row, colour = names.index(fault.target), FAULT_COLOURS.get(fault.kind, LIE_COLOUR)
        axes.barh(row, max(end_s - begin_s, 1.0), left=begin_s, color=colour, height=0.62)
        if fault.back_s is not None:
            axes.plot([end_s, end_s + fault.back_s], [row, row], color=colour, linewidth=1.2, alpha=0.6)
        axes.annotate(fault.kind, (begin_s, row), (0, 6.5), textcoords="offset points", fontsize=6.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, max(len(names), 1) - 0.2)
    axes.set_title("faults; a thin line: until the next update of its own was accepted", fontsize=9, loc="left")


def _accepted(axes: Axes, result: TrainingResult) -> None:
    """A dot for each update; the hollow ones came late."""
    taken = [entry for entry in result.entries if entry.kind == "accepted"]
    names = sorted({entry.record["worker"] for entry in taken}, reverse=True)
    for late, fill in ((False, COLOURS[2]), (True, "none")):
        dots = [
            (entry.at_s - result.begin_s, names.index(entry.record["worker"]))
            for entry in taken
            if bool(entry.record["staleness"]) is late
        ]
        if dots:
            moments, places = zip(*dots, strict=True)
            axes.scatter(moments, places, s=9, facecolors=fill, edgecolors=COLOURS[2], linewidths=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.set_title("accepted updates; hollow: late", fontsize=9, loc="left")


def _versions(axes: Axes, result: TrainingResult) -> None:
    parts = sorted({entry.part for entry in result.entries if entry.kind == "closed"})
    for part, colour in zip(parts, (*COLOURS, INK, FAINT), strict=False):
        closed = [entry for entry in result.entries if entry.kind == "closed" and entry.part == part]
        moments = [entry.at_s - result.begin_s for entry in closed]
        axes.step(moments, range(1, len(moments) + 1), where="post", color=colour, linewidth=1.2, label=part)
    axes.set_title("versions of each part", fontsize=9, loc="left")
    axes.legend(loc="upper left", frameon=False, fontsize=7)
