"""Pictures as SVG text that can stand in a page of light or of dark background."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loadtest.wan_bench.prompts import NOVEL
from loadtest.wan_bench.rows import PARTS, length_of
from loadtest.wan_bench.sweep import waterfall
from stages.errors import OnesweepError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
"""Drawn with, and then replaced by the page's own text colour."""
COLOURS = ("#3d8bd4", "#e0792b", "#2aa577", "#c76fb0", "#b59a1f", "#8577d9", "#d1605e", "#4ba6b8")
"""Readable on white and on near-black, and told apart by colour-blind readers together with the markers."""
MARKERS = "osD^vPX*"
PART_COLOURS = {
    "delay": "#8a93a0",
    "serialisation": "#b59a1f",
    "compute": "#2aa577",
    "queue": "#c76fb0",
    "rest": "#e0792b",
}
DOTTED = (0, (2, 2))
_NO_METADATA = ("Creator", "Date", "Format", "Type")
WIDTH_IN, HEIGHT_IN = 7.6, 3.8


def check_plotting() -> None:
    """Raises OnesweepError when pictures cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OnesweepError(
            "--html draws with matplotlib, which is not installed: pip install 'onesweep[plots]'"
        ) from None


def latency_picture(rows: Sequence[dict[str, Any]], profile: str) -> str:
    """Latency against output length, a line for each mode and text; floors are dashed. Idle arms have open markers."""
    from matplotlib.ticker import LogLocator

    def draw(axes: Axes) -> None:
        for label, idle_s, line, colour, marker in _lines(rows, profile):
            sizes = [row["length"] for row in line]
            axes.plot(
                sizes,
                [row["p50_ms"] for row in line],
                color=colour,
                marker=marker,
                markerfacecolor="none" if idle_s else colour,
                label=None if idle_s else label,
            )
            axes.plot(sizes, [row["floor_ms"] for row in line], color=colour, linestyle=DOTTED, linewidth=1)
        axes.plot([], [], color=INK, linestyle=DOTTED, linewidth=1, label="floor")
        for idle_s in sorted({row["idle_s"] for row in rows if row["profile"] == profile} - {0.0}):
            name = f"after {idle_s:g} s idle"
            axes.plot([], [], color=INK, marker="o", markerfacecolor="none", linewidth=0, label=name)
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _size_axis(axes, rows, profile)
        axes.set_ylabel("latency, ms (p50)")

    return _svg(draw, f"latency-{profile}", beside=True)


def ratio_picture(rows: Sequence[dict[str, Any]], profile: str) -> str:
    """Latency over floor, a bar for each arm: 1 cannot be beaten."""
    shown = [row for row in rows if row["profile"] == profile and row["ratio"] is not None]

    def draw(axes: Axes) -> None:
        labels = list(dict.fromkeys(_kind(row) for row in rows if row["profile"] == profile))
        for i, row in enumerate(shown):
            colour = COLOURS[labels.index(_kind(row)) % len(COLOURS)]
            axes.barh(i, row["ratio"], color=colour, height=0.7, alpha=0.55 if row["idle_s"] else 1)
            _note(axes, row["ratio"], i, f"{row['ratio']:.2f}")
        axes.axvline(1, color=INK, linewidth=1)
        _bar_axis(axes, [_arm_name(row) for row in shown])
        axes.set_xlim(0, max([row["ratio"] for row in shown], default=1) * 1.12)
        axes.set_xlabel("latency / floor (median)")

    return _svg(draw, f"ratio-{profile}", height=_bars_height(len(shown)))


def parts_picture(rows: Sequence[dict[str, Any]], profile: str) -> str:
    """What each arm's latency is made of, as shares of it."""
    shown = [row for row in rows if row["profile"] == profile and row["parts_ms"]]

    def draw(axes: Axes) -> None:
        for i, row in enumerate(shown):
            left, whole = 0.0, sum(max(value, 0) for value in row["parts_ms"].values())
            for part in PARTS:
                share = max(row["parts_ms"][part], 0) / whole * 100
                axes.barh(i, share, left=left, color=PART_COLOURS[part], height=0.7, label=part if i == 0 else None)
                left += share
        _bar_axis(axes, [_arm_name(row) for row in shown])
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the latency, %")

    return _svg(draw, f"parts-{profile}", height=_bars_height(len(shown)), beside=True)


def waterfall_picture(sweep: dict[str, Any]) -> str:
    """One sweep from left to right."""
    steps = waterfall(sweep)

    def draw(axes: Axes) -> None:
        left, seen = 0.0, set()
        for i, (_, part, took_ms) in enumerate(steps):
            width = max(took_ms, 0.0)
            label = part if part not in seen else None
            axes.barh(i, width, left=left, color=PART_COLOURS[part], height=0.75, label=label)
            text = f"{took_ms:.2f}" if took_ms < 10 else f"{took_ms:.1f}"
            _note(axes, left + width, i, text, to_left=left + width > 0.9 * sweep["latency_ms"], from_x=left)
            seen.add(part)
            left += width
        axes.axvline(sweep["latency_ms"], color=INK, linewidth=1, linestyle=DOTTED)
        _bar_axis(axes, [name for name, _, _ in steps])
        axes.set_xlim(0, sweep["latency_ms"] * 1.08)
        axes.set_xlabel("ms since the call")

    return _svg(draw, "waterfall", height=_bars_height(len(steps)), beside=True)


def ablation_picture(rows: Sequence[dict[str, Any]]) -> str:
    """Latency with a change over latency without it, a bar for each; a diamond for the same less the arithmetic."""
    shown = [row for row in rows if row["ratio"] is not None]

    def draw(axes: Axes) -> None:
        modes = list(dict.fromkeys(row["mode"].partition(":")[0] for row in shown))
        for i, row in enumerate(shown):
            colour = COLOURS[modes.index(row["mode"].partition(":")[0]) % len(COLOURS)]
            axes.barh(i, row["ratio"] - 1, left=1, color=colour, height=0.7)
            ends = (row["ratio"], row["net_ratio"])
            label = "without arithmetic" if i == 0 else None
            axes.plot(row["net_ratio"], i, marker="D", markersize=4, color=INK, linewidth=0, label=label)
            _note(axes, max(*ends, 1.0) + 0.02, i, f"{row['ratio']:.2f}")
        axes.axvline(1, color=INK, linewidth=1)
        _bar_axis(axes, [f"{row['measure']}: {row['change']}, {_arm_name(row)}" for row in shown])
        ratios = [row[key] for row in shown for key in ("ratio", "net_ratio")] + [1.0]
        axes.set_xlim(min(ratios) - 0.15, max(ratios) + 0.15)
        axes.legend(loc="lower right", frameon=False, fontsize=8)
        axes.set_xlabel("latency with the change / without (median of pairs)")

    return _svg(draw, "ablation", height=_bars_height(len(shown)))


def _note(axes: Axes, x: float, y: float, text: str, to_left: bool = False, from_x: float | None = None) -> None:
    """A figure at the end of a bar; `to_left` puts it before `from_x`, where there is more room."""
    at, shift = (x if from_x is None or not to_left else from_x), -3 if to_left else 3
    side = "right" if to_left else "left"
    style: dict[str, Any] = {"ha": side, "va": "center", "color": INK, "fontsize": 7.5}
    axes.annotate(text, (at, y), xytext=(shift, 0), textcoords="offset points", **style)


def _bar_axis(axes: Axes, names: Sequence[str]) -> None:
    """Bars from top to bottom, each with its name."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")


def _lines(rows: Sequence[dict[str, Any]], profile: str) -> list[tuple[str, float, list[dict[str, Any]], str, str]]:
    """(mode and text, idle seconds, its rows by length, colour, marker)."""
    mine = [row for row in rows if row["profile"] == profile]
    labels = list(dict.fromkeys(_kind(row) for row in mine))
    lines = []
    for idle_s in sorted({row["idle_s"] for row in mine}):
        for i, label in enumerate(labels):
            line = [r for r in mine if _kind(r) == label and r["idle_s"] == idle_s and r["p50_ms"] is not None]
            line.sort(key=lambda row: row["length"])
            if line:
                lines.append((label, idle_s, line, COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]))
    return lines


def _size_axis(axes: Axes, rows: Sequence[dict[str, Any]], profile: str) -> None:
    sizes = sorted({row["length"] for row in rows if row["profile"] == profile})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
    axes.set_xlabel(f"output, {rows[0]['unit']}")


def _arm_name(row: dict[str, Any]) -> str:
    idle = f", {row['idle_s']:g} s idle" if row["idle_s"] else ""
    return f"{_kind(row)}, {length_of(row)}{idle}"


def _kind(row: dict[str, Any]) -> str:
    """Mode and text; most runs have one kind of text, which goes without saying."""
    return row["mode"] if row.get("text", NOVEL.name) == NOVEL.name else f"{row['mode']}, {row['text']}"


def _bars_height(bars: int) -> float:
    return max(0.7 + 0.24 * bars, 1.4)


def _svg(draw: Callable[[Axes], None], name: str, height: float = HEIGHT_IN, beside: bool = False) -> str:
    """Draw one picture. `beside`: with a legend to its right."""
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text, in the page's font; ids do not clash between pictures of one page
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 9}
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(style | dict.fromkeys(ink, INK)):
        figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(True, color="#8a93a0", alpha=0.35, linewidth=0.6)
        draw(axes)
        if beside and axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        return _text_of(figure)


def _text_of(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(_NO_METADATA))
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")
