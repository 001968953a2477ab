"""The picture: quality against seconds, a panel for each network, on a light ground of its own."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loadtest.frontier.points import AutoPoint, Point
from loadtest.quality.row import AT_HUMAN_ENTROPY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "local": ("#555555", "X", "local model, no sweep"),
    "sweep": ("#e69f00", "v", "sweep, chunked"),
    "chunked": ("#e69f00", "v", "sweep, chunked"),
    "resample": ("#0072b2", "o", "resample"),
    "verified": ("#009e73", "D", "verified"),
    "ar-speculative": ("#cc79a7", "P", "ar-speculative"),
    "ar": ("#d55e00", "s", "ar, token by token"),
}
"""Colour (Okabe and Ito's), marker, words."""
HOLLOW = "chain"
"""The scorer whose points are hollow: trained block by block."""
MARKS = ("local", "ar")
INK, FAINT = "#222222", "#9aa0a6"
WIDTH_IN, HEIGHT_IN = 11.0, 4.4
ROOM = 0.3
"""Of the picture below the local model and AR, over what is between them and the best: what is worse is a note."""
GAP = (0.17, 0.075)
"""Between words, in shares of a panel's width and height."""
_NO_METADATA = ("Creator", "Date", "Format", "Type")


def frontier_picture(
    points: Sequence[Point], auto: Sequence[AutoPoint], human_bits: float | None, basis: str, judge: str
) -> str:
    """An SVG element. Up is better, left is quicker; text is drawn as paths, so that it looks alike everywhere."""
    import matplotlib
    from matplotlib.figure import Figure

    profiles = list(dict.fromkeys(point.profile for point in points))
    style: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "frontier", "font.size": 9}
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(style | dict.fromkeys(ink, INK)):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained", facecolor="white")
        best, worst = _limits(points, human_bits)
        panels = figure.subplots(1, max(1, len(profiles)), sharey=True, squeeze=False)[0]
        panels[0].set_ylim(worst, best)
        for axes, profile in zip(panels, profiles, strict=False):
            own = [point for point in points if point.profile == profile and point.seconds is not None]
            budgets = [point for point in auto if point.profile == profile and point.bits is not None]
            _panel(axes, own, budgets, human_bits, worst)
            axes.set_title(_title(profile), fontsize=10)
        at = ", at human entropy" if basis == AT_HUMAN_ENTROPY else ""
        panels[0].set_ylabel(f"bits a byte under {judge}{at}\n(up is better)")
        _legend(figure, panels, any(p.scorer == HOLLOW for p in points), bool(auto))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(_NO_METADATA))
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


def _panel(
    axes: Axes, points: Sequence[Point], auto: Sequence[AutoPoint], human_bits: float | None, worst: float
) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.grid(True, which="major", color=FAINT, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("seconds for a text")
    if human_bits is not None:
        axes.axhline(human_bits, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        axes.annotate("human text", (0.01, human_bits), (2, 3), ("axes fraction", "data"), "offset points", fontsize=8)
    front = sorted((p for p in points if p.pareto), key=lambda p: p.seconds or 0.0)
    axes.step([p.seconds or 0.0 for p in front], [p.bits for p in front], where="post", color=FAINT, linewidth=1.4)
    for point in points:
        _mark(axes, point, worst)
    for budget in auto:
        assert budget.bits is not None
        limit = budget.budget_ms / 1000
        axes.plot([budget.seconds or 0.0, limit], [budget.bits] * 2, color=INK, linewidth=0.9)
        axes.plot(limit, budget.bits, "*", color=INK, ms=8, mfc="#f0e442", mew=0.8)
    axes.margins(x=0.12)
    axes.autoscale_view(scaley=False)  # words are placed by where points come to stand
    for point in _named(axes, points, worst):
        mark = point.mode in MARKS
        style: dict[str, Any] = {"ha": "center" if mark else "right", "va": "bottom", "fontsize": 7}
        at, shift = (point.seconds or 0.0, point.bits), (0, 6) if mark else (-3, 4)
        axes.annotate(_words(point), at, shift, textcoords="offset points", **style)


def _mark(axes: Axes, point: Point, worst: float) -> None:
    """A point; one that lies below the picture stands at its lower edge, with its bits."""
    colour, marker, _ = STYLES[point.mode]
    inside = "white" if point.scorer == HOLLOW else colour
    assert point.seconds is not None
    if point.bits > worst:
        axes.plot(point.seconds, worst, marker, color=colour, mfc=inside, ms=7, mew=1.4, clip_on=False)
        words: dict[str, Any] = {"ha": "center", "fontsize": 7, "textcoords": "offset points"}
        axes.annotate(f"{point.bits:.2f} ↓", (point.seconds, worst), (0, 6), **words)
        return
    if point.bits_low is not None and point.bits_high is not None:
        ends = [point.bits_low, min(point.bits_high, worst)]
        axes.plot([point.seconds] * 2, ends, color=colour, linewidth=1, alpha=0.6)
    axes.plot(point.seconds, point.bits, marker, color=colour, mfc=inside, ms=7, mew=1.4)


def _limits(points: Sequence[Point], human_bits: float | None) -> tuple[float, float]:
    """Bits at the upper and at the lower edge: what matters lies between human text and the local model."""
    bits = [point.bits for point in points if point.seconds is not None] or [1.0]
    best = min([*bits, *([human_bits] if human_bits is not None else [])])
    marks = [point.bits for point in points if point.mode in MARKS and point.seconds is not None] or bits
    worst = min(max(bits), max(marks) + ROOM * (max(marks) - best))
    space = max(worst - best, 0.1) * 0.12
    return best - space, worst + space


def _named(axes: Axes, points: Sequence[Point], worst: float) -> list[Point]:
    """Points with words above them: the marks, then those of the frontier that leave room for them."""
    named: list[Point] = []
    first = sorted(points, key=lambda p: (p.mode not in MARKS, not p.pareto, p.seconds))
    for point in first:
        if point.bits > worst or not (point.pareto or point.mode in MARKS):
            continue
        here = _place(axes, point)
        if all(max(abs(a - b) / gap for a, b, gap in zip(here, _place(axes, o), GAP, strict=True)) > 1 for o in named):
            named.append(point)
    return named


def _place(axes: Axes, point: Point) -> tuple[float, float]:
    """In shares of the panel's width and height."""
    x, y = axes.transAxes.inverted().transform(axes.transData.transform((point.seconds or 0.0, point.bits)))
    return float(x), float(y)


def _words(point: Point) -> str:
    if point.mode in MARKS:
        return point.mode
    return f"{point.sweeps:.0f} sweep{'s' * (round(point.sweeps or 0) != 1)}"


def _title(profile: str) -> str:
    kind, _, delay = profile.partition("links-")
    return f"links of {delay} ms round trip" if not kind and delay.isdigit() else profile


def _legend(figure: Any, panels: Sequence[Axes], hollow: bool, auto: bool) -> None:  # noqa: ANN401
    from matplotlib.lines import Line2D

    drawn = {line.get_marker() for axes in panels for line in axes.lines}
    words: dict[str, Line2D] = {}
    for colour, marker, text in STYLES.values():
        if marker in drawn:
            words[text] = Line2D([], [], color=colour, marker=marker, linewidth=0, ms=7)
    if hollow:
        colour, marker, _ = STYLES["resample"]
        words["hollow: scorer trained block by block"] = Line2D(
            [], [], color=colour, marker=marker, mfc="white", linewidth=0, ms=7
        )
    if auto:
        words["auto: its budget, and a line to its seconds"] = Line2D(
            [], [], color=INK, marker="*", mfc="#f0e442", linewidth=0.9, ms=9
        )
    figure.legend(
        words.values(), words.keys(), loc="outside lower center", ncols=min(len(words), 5), frameon=False, fontsize=8
    )
