"""The report: one HTML file with everything in it, readable on a light and on a dark screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.latency.links import LINKS
from onesweep.loadtest.latency.rows import ARM, PARTS, PICTURES, Row, compared, drawn, failures, length_of, waterfall
from onesweep.loadtest.report.chart import COLOURS, DOTTED, FAINT, INK, MARKERS, bars, bars_height_in, draw_chart, grid
from onesweep.loadtest.report.page import bullets, figure, html_page, html_pairs, shown
from onesweep.loadtest.report.table import Table, number_column, text_column
from onesweep.loadtest.workload.prompts import NOVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = {
    "delay": FAINT,
    "serialisation": COLOURS[4],
    "compute": COLOURS[2],
    "queue": COLOURS[3],
    "rest": COLOURS[1],
}
WIDTH_IN, HEIGHT_IN = 7.6, 3.8  # a page's column


def latency_picture(rows: Sequence[Row], profile: str) -> str:
    """Latency against output length, a line for each mode and text; floors are dashed. Idle arms have open markers.

    :param rows: of one profile, here and below.
    """
    from matplotlib.ticker import LogLocator

    def draw(axes: Axes) -> None:
        for row, line, colour, marker in _lines(rows):
            sizes, fill = [each["length"] for each in line], "none" if row["idle_s"] else colour
            name = None if row["idle_s"] else _kind(row)
            latencies = [each["p50_ms"] for each in line]
            axes.plot(sizes, latencies, color=colour, marker=marker, markerfacecolor=fill, label=name)
            axes.plot(sizes, [each["floor_ms"] for each in line], color=colour, linestyle=DOTTED, linewidth=1)
        axes.plot([], [], color=INK, linestyle=DOTTED, linewidth=1, label="floor")
        for idle_s in sorted({row["idle_s"] for row in rows} - {0.0}):
            name = f"after {idle_s:g} s idle"
            axes.plot([], [], color=INK, marker="o", markerfacecolor="none", linewidth=0, label=name)
        grid(axes)
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        sizes = sorted({row["length"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlim(min(sizes) / 1.2, max(sizes) * 1.2)
        axes.set_xlabel("levels of noise" if drawn(rows) else f"output, {rows[0]['unit']}")
        axes.set_ylabel("latency, ms (p50)")

    return _chart(draw, f"latency-{profile}", beside=True)


def ratio_picture(rows: Sequence[Row], profile: str) -> str:
    """Latency over floor, a bar for each arm: 1 cannot be beaten."""
    known = [row for row in rows if row["ratio"] is not None]

    def draw(axes: Axes) -> None:
        kinds = list(dict.fromkeys(map(_kind, rows)))
        for i, row in enumerate(known):
            colour = COLOURS[kinds.index(_kind(row)) % len(COLOURS)]
            axes.barh(i, row["ratio"], color=colour, height=0.7, alpha=0.55 if row["idle_s"] else 1)
            _note(axes, row["ratio"], i, f"{row['ratio']:.2f}")
        axes.axvline(1, color=INK, linewidth=1)
        bars(axes, [_arm_name(row) for row in known])
        axes.set_xlim(0, max([row["ratio"] for row in known], default=1) * 1.12)
        axes.set_xlabel("latency / floor (median)")

    return _chart(draw, f"ratio-{profile}", bars_height_in(len(known)))


def parts_picture(rows: Sequence[Row], profile: str) -> str:
    """The parts of each arm's latency, as shares of it."""
    known = [row for row in rows if row["parts_ms"]]

    def draw(axes: Axes) -> None:
        for i, row in enumerate(known):
            # a rest below 0 is a floor that jitter undercut: no bar can show it
            left, whole = 0.0, sum(max(value, 0) for value in row["parts_ms"].values())
            for part in PARTS:
                share = max(row["parts_ms"][part], 0) / whole * 100
                axes.barh(i, share, left=left, color=PART_COLOURS[part], height=0.7, label=part if i == 0 else None)
                left += share
        bars(axes, [_arm_name(row) for row in known])
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the latency, %")

    return _chart(draw, f"parts-{profile}", bars_height_in(len(known)), beside=True)


def waterfall_picture(sweep: Row) -> str:
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
        bars(axes, [name for name, _, _ in steps])
        axes.set_xlim(0, sweep["latency_ms"] * 1.08)
        axes.set_xlabel("ms since the call")

    return _chart(draw, "waterfall", bars_height_in(len(steps)), beside=True)


def _lines(rows: Sequence[Row]) -> Iterator[tuple[Row, list[Row], str, str]]:
    """Each line: its first row, its rows by length, colour, marker."""
    kinds = list(dict.fromkeys(map(_kind, rows)))
    for idle_s in sorted({row["idle_s"] for row in rows}):
        for i, kind in enumerate(kinds):
            line = [r for r in rows if _kind(r) == kind and r["idle_s"] == idle_s and r["p50_ms"] is not None]
            line.sort(key=lambda row: row["length"])
            if line:
                yield line[0], line, COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]


def _note(axes: Axes, x: float, y: float, text: str, to_left: bool = False, from_x: float | None = None) -> None:
    """A figure at the end of a bar; `to_left` puts it before `from_x`, where there is more room."""
    at, shift = (x if from_x is None or not to_left else from_x), -3 if to_left else 3
    side = "right" if to_left else "left"
    style: dict[str, Any] = {"ha": side, "va": "center", "color": INK, "fontsize": 7.5}
    axes.annotate(text, (at, y), xytext=(shift, 0), textcoords="offset points", **style)


def _arm_name(row: Row) -> str:
    idle = f", {row['idle_s']:g} s idle" if row["idle_s"] else ""
    return f"{_kind(row)}, {length_of(row)}{idle}"


def _kind(row: Row) -> str:
    """Mode and text; most runs have one kind of text, which goes without saying."""
    common = drawn([row]) or row.get("text", NOVEL.name) == NOVEL.name
    return row["mode"] if common else f"{row['mode']}, {row['text']}"


def _chart(draw: Callable[[Axes], None], name: str, height_in: float = HEIGHT_IN, beside: bool = False) -> str:
    """One chart. `beside`: with a legend to its right."""

    def draw_all(canvas: Figure) -> None:
        draw(canvas.add_subplot())
        if beside and canvas.axes[0].get_legend_handles_labels()[0]:
            canvas.legend(loc="outside right upper", frameon=False, fontsize=8)

    return draw_chart(draw_all, name, WIDTH_IN, height_in)


_FLOOR = """The <b>floor</b> of a request is what these links and these hosts take whatever serves on them: the one-way
delays on its critical path, the payload's bits over the links' rate, and the arithmetic that the hosts (and a drafter)
booked for that very request. Not in it: TCP/IP and HTTP/2 headers, queues, gRPC, protobuf, Python, waiting for a
processor. <b>× floor</b> is the median of latency over floor, request by request."""

_WRITTEN = """<b>Accepted</b>: draft tokens that were right, of those that were reached. <b>As ar</b>: texts that are
those of <code>ar</code> with the same seed, in modes that promise them."""

_DRAWN = """<b>Trips</b>: passes along all hosts. <b>Largest hop</b>: payload of a message, in <code>steps</code> the
mean over trips. <b>Host ms a picture</b>: arithmetic of all hosts. <b>As one process</b>: pictures that are, to the
last bit, those that the same nets draw in one process."""

_PAGE: Table[Row] = Table(
    (
        *ARM,
        number_column("p50 ms", "p50_ms"),
        number_column("p95 ms", "p95_ms"),
        number_column("first byte ms", "first_byte_ms"),
        number_column("floor ms", "floor_ms"),
        number_column("× floor", "ratio", 2),
        number_column("tokens/s", "tokens_per_s"),
        number_column("sweeps", "sweeps", 0),
        number_column("hops", "hops", 0),
        number_column("wire bytes", "wire_bytes", 0),
        number_column("largest hop", "largest_hop_bytes", 0),
        number_column("host-seconds", "host_seconds", 3),
        number_column("accepted", "acceptance", 2),
        ("as ar", compared("same_as_ar")),
        text_column("requests"),
        text_column("failed", "failures"),
    ),
    text_columns=4,
)


def report(record: dict[str, Any]) -> str:
    """The whole page, from the record of a run."""
    rows = record["rows"]
    table, read = (PICTURES, _DRAWN) if drawn(rows) else (_PAGE, _WRITTEN)
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    title = f"onesweep over a WAN: {', '.join(profiles)}"
    parts = [f"<h1>{shown(title)}</h1>", _origin(record), f"<p>{_FLOOR}</p>"]
    for profile in profiles:
        parts += [
            f"<h2>Profile {shown(profile)}</h2>",
            *_profile([r for r in rows if r["profile"] == profile], profile),
        ]
    if record["sweep"]:
        parts.append(_waterfall(record["sweep"]))
    parts += ["<h2>Every arm</h2>", f"<p>{read}</p>", table.html(rows), bullets(failures(rows), bad=True)]
    if record["links"]:
        parts += ["<h2>What the lab itself costs</h2>"]
        parts += ["<p>Round trips of 64 bytes on plain sockets, against what the profile promises.</p>"]
        parts += [LINKS.html(record["links"])]
    if record["links"] and record["control"]:
        parts += ["<p>The same requests, in turns, in the lab's fastest network and on plain loopback.</p>"]
        parts += [table.html(record["control"])]
    parts += ["<h2>Settings</h2>", html_pairs(record["settings"] | {"commit": record["commit"]} | record["machine"])]
    return html_page(title, parts)


def _origin(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["machine"]
    where = "each in a network namespace, emulated links" if record["links"] else "no lab"
    return (
        f"<p>{settings['hosts']} hosts and a router on one machine ({shown(machine['processor'])}, "
        f"{machine['cores']} cores, {shown(machine['system'])}), {where}; "
        f"{settings['requests']} turns of {settings['at_once']} requests an arm, seeds from {settings['seed']}; "
        f"commit <code>{shown(record['commit'][:12])}</code>.</p><pre>{shown(record['command'])}</pre>"
    )


def _profile(rows: Sequence[Row], profile: str) -> list[str]:
    if all(row["p50_ms"] is None for row in rows):
        return ["<p class='bad'>No request ended well.</p>"]
    captions = {
        latency_picture: f"Latency against output length on {profile}; dashed, the floor. Both axes are logarithmic.",
        ratio_picture: f"How far from the floor on {profile}: 1 cannot be beaten.",
        parts_picture: "The parts of the latency (medians). Rest: gRPC, Python, TCP, headers, waiting for a processor.",
    }
    return [figure(picture(rows, profile), caption) for picture, caption in captions.items()]


def _waterfall(sweep: Row) -> str:
    what = (
        f"The request of median latency: {sweep['mode']}, {length_of(sweep)}, profile {sweep['profile']}, "
        f"seed {sweep['seed']}, {sweep['latency_ms']:.1f} ms. Delay and serialisation are the profile's; queue and "
        "compute were booked by the hosts; the rest is known only as a sum, so it stands at the end."
    )
    return f"<h2>One sweep, hop by hop</h2>{figure(waterfall_picture(sweep), what)}"
