"""The time line: what happened to whom, what was accepted, and how far each part came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.chaos.picture import FAINT, INK, Panel, over_time
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


def time_line(result: TrainingResult) -> str:
    """An SVG element on a light ground of its own; text is drawn as paths."""
    panels = [
        Panel(2.2, lambda axes: _faults(axes, result)),
        Panel(1.6, lambda axes: _accepted(axes, result)),
        Panel(1.4, lambda axes: _versions(axes, result)),
    ]
    spans = [
        (fault.begin_s - result.begin_s, fault.end_s - result.begin_s, FAULT_COLOURS.get(fault.kind, LIE_COLOUR))
        for fault in result.happened
    ]
    return over_time(panels, spans, result.end_s - result.begin_s, 7.0)


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
