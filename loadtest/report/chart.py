"""Charts as SVG text in one style, drawn by matplotlib (extra `plots`), which is imported when a chart is drawn."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from onesweep.stages.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; the last two are for longer lists.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8577d9", "#777777")
MARKERS = "os^DvPX*"  # for readers without colours
INK, FAINT = "#222222", "#9aa0a6"
DOTTED = (0, (2, 2))
NO_METADATA = ("Creator", "Date", "Format", "Type")  # the same figures give the same file


def check_plotting(flag: str = "--html") -> None:
    """Raises InputError where charts cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError(f"{flag} draws with matplotlib, which is not installed: pip install 'onesweep[plots]'")


def draw_chart(
    draw: Callable[[Figure], None], name: str, width_in: float = 10.0, height_in: float = 4.0, *, own_page: bool = False
) -> str:
    """An SVG element.

    :param name: of the chart in its page; it keeps ids of different charts apart.
    :param own_page: a picture that stands alone, on a white ground with text as paths, so that it looks alike
        everywhere. Else it takes the colour and the font of its page, light or dark.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "path" if own_page else "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width_in, height_in), layout="constrained", facecolor="white")
        draw(figure)
        for axes in figure.axes:
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=not own_page, metadata=dict.fromkeys(NO_METADATA))
    svg = file.getvalue()
    svg = re.sub(r"(\d+\.\d{2})\d+", r"\1", svg[svg.index("<svg") :])  # a hundredth of a point is enough
    return svg if own_page else svg.replace(INK, "currentColor")


def grid(axes: Axes, axis: str = "both", which: str = "major") -> None:
    """The faint lines behind a chart."""
    axes.grid(True, which=which, axis=axis, color=FAINT, alpha=0.35, linewidth=0.6)  # type: ignore[arg-type]


def bars(axes: Axes, names: Sequence[str]) -> None:
    """Horizontal bars from top to bottom, bar i called `names[i]`."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    grid(axes, "x")


def bars_height_in(count: int) -> float:
    """Height of a chart of so many bars."""
    return max(0.7 + 0.24 * count, 1.4)


@dataclass(frozen=True)
class Panel:
    """One of several charts above each other over the same seconds."""

    height: float
    draw: Callable[[Axes], None]


def draw_timeline(
    panels: Sequence[Panel],
    spans: Sequence[tuple[float, float, str]],
    seconds: float,
    height_in: float,
    *,
    own_page: bool = False,
) -> str:
    """Panels over one time axis.

    :param spans: begin, end and colour of times that are shaded in all panels but the first.
    """

    def draw(figure: Figure) -> None:
        rows = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, height_ratios=[panel.height for panel in panels]
        )[:, 0]
        for axes, panel in zip(rows, panels, strict=True):
            panel.draw(axes)
            grid(axes, "x")
        for axes in rows[1:]:
            for begin_s, end_s, colour in spans:
                axes.axvspan(begin_s, end_s, color=colour, alpha=0.13, linewidth=0)
        rows[-1].set_xlabel("seconds of the run")
        rows[-1].set_xlim(0, seconds)

    return draw_chart(draw, "timeline", 10.5, height_in, own_page=own_page)


def legend_above(columns: int) -> dict[str, Any]:
    """Arguments of `Axes.legend` for a legend above a panel, where it hides nothing."""
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "borderaxespad": 0.0}
    return {**place, "frameon": False, "ncols": columns, "fontsize": 7}
