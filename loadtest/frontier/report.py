"""Results of the frontier: markdown tables for a terminal, the chart, and a page with both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.frontier.points import AutoPoint, Point
from onesweep.loadtest.quality.panel import AT_HUMAN_ENTROPY
from onesweep.loadtest.report.chart import FAINT, INK, draw_chart, grid
from onesweep.loadtest.report.page import bullets, figure, html_page, html_pairs, shown
from onesweep.loadtest.report.table import Table, markdown, number, number_column, text_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def points_table(points: Sequence[Point], human_bits: float | None) -> str:
    """A row for each mode and setting, the best text last; seconds for each profile. The frontier's are bold."""
    profiles = list(dict.fromkeys(point.profile for point in points))
    specs = sorted(dict.fromkeys(p.spec for p in points), key=lambda spec: -_of(points, spec)[0].bits)
    header = [
        "mode",
        "sweeps",
        *(f"s, {profile}" for profile in profiles),
        "judge bits",
        "exact bits",
        "host-s",
        "router-s",
    ]
    rows = []
    for spec in specs:
        own = _of(points, spec)
        at = {point.profile: point for point in own}
        seconds = [_seconds(at[profile]) if profile in at else "-" for profile in profiles]
        first = next((p for p in own if p.seconds is not None), own[0])
        costs = [number(first.exact_bits, 3), number(first.host_seconds, 2), number(first.router_seconds, 2)]
        rows.append([f"`{spec}`", number(first.sweeps, 0), *seconds, _bits(first), *costs])
    if human_bits is not None:
        rows.append(["human text", "", *("" for _ in profiles), f"{human_bits:.3f}", "", "", ""])
    return markdown(header, rows)


def _picked(point: AutoPoint) -> str:
    """The settings that began texts."""
    if not point.picked:
        return point.error or "-"
    shares = [f"{label} ({count})" for label, count in point.picked.items()]
    hurried = f"; {point.hurried} of {point.requests} finished by another" if point.hurried else ""
    return ", ".join(shares) + hurried


AUTO: Table[AutoPoint] = Table(
    (
        text_column("profile"),
        ("picked", _picked),
        number_column("budget s", "budget_ms", 2, scale=1e-3),
        number_column("s", "seconds", 2),
        number_column("worst / budget", "worst", 2),
        ("kept", lambda point: {True: "yes", False: "no", None: "-"}[point.kept]),
        number_column("bits", "bits", 3),
        ("best fixed that fits", lambda point: point.best_fixed or "none"),
        number_column("its bits", "best_fixed_bits", 3),
    ),
    text_columns=2,
)
POINTS: Table[Point] = Table(
    (
        text_column("profile"),
        ("mode", lambda point: point.spec + (" *" if point.pareto else "")),
        number_column("seconds", "seconds", 2),
        number_column("p95", "seconds_p95", 2),
        ("judge bits", lambda point: _bits(point)),
        number_column("exact bits", "exact_bits", 3),
        number_column("sweeps", "sweeps"),
        number_column("host-s", "host_seconds", 3),
        number_column("router-s", "router_seconds", 3),
        number_column("wire bytes", "wire_bytes", 0),
    ),
    text_columns=2,
)


def failures(points: Sequence[Point | AutoPoint]) -> list[str]:
    """A sentence for each row with requests that failed."""
    lines = []
    for point in points:
        if point.failures:
            what = point.spec if isinstance(point, Point) else f"auto, {point.budget_ms} ms"
            lines.append(
                f"{point.profile}, {what}: {point.failures} of {point.requests} failed, such as: {point.error}"
            )
    return lines


def _of(points: Sequence[Point], spec: str) -> list[Point]:
    return [point for point in points if point.spec == spec]


def _seconds(point: Point) -> str:
    if point.seconds is None:
        return "failed"
    return f"**{point.seconds:.2f}**" if point.pareto else f"{point.seconds:.2f}"


def _bits(point: Point) -> str:
    if point.bits_low is None or point.bits_high is None:
        return f"{point.bits:.3f}"
    return f"{point.bits:.3f} ± {(point.bits_high - point.bits_low) / 2:.3f}"


# Colour (Okabe and Ito's), marker, words.
STYLES = {
    "local": ("#555555", "X", "local model, no sweep"),
    "sweep": ("#e69f00", "v", "sweep, chunked"),
    "chunked": ("#e69f00", "v", "sweep, chunked"),
    "resample": ("#0072b2", "o", "resample"),
    "verified": ("#009e73", "D", "verified"),
    "ar-speculative": ("#cc79a7", "P", "ar-speculative"),
    "ar": ("#d55e00", "s", "ar, token by token"),
}
HOLLOW = "scorer"  # the scorer whose points are hollow: trained block by block
MARKS = ("local", "ar")  # always named: the ends between which the others lie
WIDTH_IN, HEIGHT_IN = 11.0, 4.4
# Of the picture below the local model and AR, over what is between them and the best: what is worse is a note.
ROOM = 0.3
GAP = (0.17, 0.075)  # between words, in shares of a panel's width and height


def frontier_picture(
    points: Sequence[Point], auto: Sequence[AutoPoint], human_bits: float | None, basis: str, judge: str
) -> str:
    """An SVG element. Up is better, left is quicker; text is drawn as paths, so that it looks alike everywhere."""
    profiles = list(dict.fromkeys(point.profile for point in points))
    best, worst = _limits(points, human_bits)
    at = ", at human entropy" if basis == AT_HUMAN_ENTROPY else ""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, max(1, len(profiles)), sharey=True, squeeze=False)[0]
        panels[0].set_ylim(worst, best)
        for axes, profile in zip(panels, profiles, strict=False):
            own = [point for point in points if point.profile == profile and point.seconds is not None]
            budgets = [point for point in auto if point.profile == profile and point.bits is not None]
            _panel(axes, own, budgets, human_bits, worst)
            axes.set_title(_title(profile), fontsize=10)
        panels[0].set_ylabel(f"bits a byte under {judge}{at}\n(up is better)")
        _legend(figure, panels, any(p.scorer == HOLLOW for p in points), bool(auto))

    return draw_chart(draw, "frontier", WIDTH_IN, HEIGHT_IN, own_page=True)


def _panel(
    axes: Axes, points: Sequence[Point], auto: Sequence[AutoPoint], human_bits: float | None, worst: float
) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    grid(axes)
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


def _legend(figure: Figure, panels: Sequence[Axes], hollow: bool, auto: bool) -> None:
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


_READING = """A point is a mode with its settings: how long a text takes (median, at the client, one request at a time)
and how many bits a judge, a stronger model trained apart, needs for a byte of it. Fewer bits are better only while the
text is as varied as human text. The line joins the points that nothing beats in both. A star is mode <b>auto</b>, the
bar right of it its budget."""


def frontier_page(record: dict[str, Any]) -> str:
    """The whole page, from the record of a run."""
    points, auto = _page_of(record)
    title = "onesweep: quality against seconds"
    problems = [*failures(points), *failures(auto), *record["problems"], *record["left_out"]]
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{_READING}</p><pre>{shown(record['command'])}</pre>",
        figure(record_picture(record), "Quality against seconds."),
        "<h2>Every setting</h2>",
        "<p>*: nothing is both as quick and as good.</p>",
        POINTS.html(points),
        "<h2>auto</h2>",
        AUTO.html(auto),
        bullets(problems, bad=True),
        "<h2>Settings</h2>",
        html_pairs(record["settings"] | {"judge": record["judge"], "bits": record["basis"]} | record["machine"]),
    ]
    return html_page(title, parts)


def record_picture(record: dict[str, Any]) -> str:
    """The picture alone, an SVG element."""
    return frontier_picture(*_page_of(record), record["human_bits"], record["basis"], record["judge"])


def _page_of(record: dict[str, Any]) -> tuple[list[Point], list[AutoPoint]]:
    points = [Point(**point) for point in record["points"]]
    return points, [AutoPoint(**{k: v for k, v in point.items() if k != "as_good"}) for point in record["auto"]]
