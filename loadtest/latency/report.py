"""The report: one HTML file with everything in it, readable on a light and on a dark screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loadtest.latency.rows import PARTS, length_of, text_cells, waterfall
from loadtest.report.chart import COLOURS, DOTTED, FAINT, INK, MARKERS, bars, bars_height_in, draw_chart, grid
from loadtest.report.page import figure, html_page, html_pairs, html_table, shown
from loadtest.report.table import number
from loadtest.workload.prompts import NOVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Pictures as SVG text that can stand in a page of light or of dark background.


PART_COLOURS = {
    "delay": FAINT,
    "serialisation": COLOURS[4],
    "compute": COLOURS[2],
    "queue": COLOURS[3],
    "rest": COLOURS[1],
}
WIDTH_IN, HEIGHT_IN = 7.6, 3.8


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
        grid(axes)
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _size_axis(axes, rows, profile)
        axes.set_ylabel("latency, ms (p50)")

    return _chart(draw, f"latency-{profile}", beside=True)


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
        bars(axes, [_arm_name(row) for row in shown])
        axes.set_xlim(0, max([row["ratio"] for row in shown], default=1) * 1.12)
        axes.set_xlabel("latency / floor (median)")

    return _chart(draw, f"ratio-{profile}", bars_height_in(len(shown)))


def parts_picture(rows: Sequence[dict[str, Any]], profile: str) -> str:
    """The parts of each arm's latency, as shares of it."""
    shown = [row for row in rows if row["profile"] == profile and row["parts_ms"]]

    def draw(axes: Axes) -> None:
        for i, row in enumerate(shown):
            left, whole = 0.0, sum(max(value, 0) for value in row["parts_ms"].values())
            for part in PARTS:
                share = max(row["parts_ms"][part], 0) / whole * 100
                axes.barh(i, share, left=left, color=PART_COLOURS[part], height=0.7, label=part if i == 0 else None)
                left += share
        bars(axes, [_arm_name(row) for row in shown])
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the latency, %")

    return _chart(draw, f"parts-{profile}", bars_height_in(len(shown)), beside=True)


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
        bars(axes, [name for name, _, _ in steps])
        axes.set_xlim(0, sweep["latency_ms"] * 1.08)
        axes.set_xlabel("ms since the call")

    return _chart(draw, "waterfall", bars_height_in(len(steps)), beside=True)


def _note(axes: Axes, x: float, y: float, text: str, to_left: bool = False, from_x: float | None = None) -> None:
    """A figure at the end of a bar; `to_left` puts it before `from_x`, where there is more room."""
    at, shift = (x if from_x is None or not to_left else from_x), -3 if to_left else 3
    side = "right" if to_left else "left"
    style: dict[str, Any] = {"ha": side, "va": "center", "color": INK, "fontsize": 7.5}
    axes.annotate(text, (at, y), xytext=(shift, 0), textcoords="offset points", **style)


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

_READ = """What the very texts are worth, without a judge: <b>nats a token</b> is their loss under the served model
itself, each text after its own prompt, at temperature 1; <b>excess</b> what of it is above the entropy of that model's
odds at each place, 0 on average for what it draws itself at temperature 1; <b>entropy</b> and <b>4-gram</b> the bits of
their tokens and of runs of four, <b>distinct-2</b> the share of a text's pairs of words that are different: a low loss
can be bought with monotony. <b>As ar</b>: texts that are those of <code>ar</code> at the same seed. <b>Gap closed</b>:
of the way from the drafter's loss to that of <code>ar</code>. ±: a standard error over texts."""

_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("p50_ms", "p50 ms", 1),
    ("p95_ms", "p95 ms", 1),
    ("first_byte_ms", "first byte ms", 1),
    ("floor_ms", "floor ms", 1),
    ("ratio", "× floor", 2),
    ("tokens_per_s", "tokens/s", 1),
    ("sweeps", "sweeps", 0),
    ("hops", "hops", 0),
    ("wire_bytes", "wire bytes", 0),
    ("largest_hop_bytes", "largest hop", 0),
    ("host_seconds", "host-seconds", 3),
    ("acceptance", "accepted", 2),
    ("texts", "texts", 0),
)
_IN_A_LAB = "each in a network namespace, emulated links"
_TEXTS = ("nats a token", "excess", "entropy", "4-gram", "distinct-2", "as ar", "gap closed")


def report(record: dict[str, Any]) -> str:
    """The whole page, from the record of a run."""
    rows = record["rows"]
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    title = f"onesweep over a WAN: {', '.join(profiles)}"
    parts = [f"<h1>{shown(title)}</h1>", _origin(record), f"<p>{_FLOOR}</p>"]
    for profile in profiles:
        parts += [f"<h2>Profile {shown(profile)}</h2>", *_profile(rows, profile)]
    if record["sweep"]:
        parts.append(_waterfall(record["sweep"]))
    parts += ["<h2>Every arm</h2>", f"<p>{_READ}</p>", _table(rows), *_errors(rows)]
    if record["links"]:
        parts += _links(record)
    parts += ["<h2>Settings</h2>", html_pairs(record["settings"] | {"commit": record["commit"]} | record["machine"])]
    return html_page(title, parts)


def _origin(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["machine"]
    return (
        f"<p>{settings['hosts']} hosts and a router on one machine ({shown(machine['processor'])}, "
        f"{machine['cores']} cores, {shown(machine['system'])}), {_IN_A_LAB if record['links'] else 'no lab'}; "
        f"{settings['requests']} turns of {settings['at_once']} requests an arm, seeds from {settings['seed']}; "
        f"commit <code>{shown(record['commit'][:12])}</code>.</p><pre>{shown(record['command'])}</pre>"
    )


def _profile(rows: Sequence[dict[str, Any]], profile: str) -> list[str]:
    if not any(row["profile"] == profile and row["p50_ms"] is not None for row in rows):
        return ["<p class='bad'>No request ended well.</p>"]
    return [
        figure(
            latency_picture(rows, profile),
            f"Latency against output length on {profile}; dashed, the floor. Both axes are logarithmic.",
        ),
        figure(ratio_picture(rows, profile), f"How far from the floor on {profile}: 1 cannot be beaten."),
        figure(
            parts_picture(rows, profile),
            "What the latency is made of (medians). Rest: gRPC, Python, TCP, headers, waiting for a processor.",
        ),
    ]


def _waterfall(sweep: dict[str, Any]) -> str:
    what = (
        f"The request of median latency: {sweep['mode']}, {length_of(sweep)}, profile {sweep['profile']}, "
        f"seed {sweep['seed']}, {sweep['latency_ms']:.1f} ms. Delay and serialisation are the profile's; queue and "
        "compute were booked by the hosts; the rest is known only as a sum, so it stands at the end."
    )
    return f"<h2>One sweep, hop by hop</h2>{figure(waterfall_picture(sweep), what)}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["profile", "text", "mode", "length", "idle s", *(name for _, name, _ in _COLUMNS)]
    head += [*_TEXTS, "requests", "failed"]
    body = []
    for row in rows:
        cells = [*(shown(row[key]) for key in ("profile", "text", "mode")), length_of(row), f"{row['idle_s']:g}"]
        cells += [number(row[key], digits) for key, _, digits in _COLUMNS]
        cells += text_cells(row)
        failed = f"<span class='bad'>{row['failures']}</span>" if row["failures"] else "0"
        body.append([*cells, str(row["requests"]), failed])
    return html_table(head, body, text_columns=4)


def _errors(rows: Sequence[dict[str, Any]]) -> list[str]:
    failed = [row for row in rows if row["failures"]]
    return [
        f"<p class='bad'>{shown(row['profile'])}, {shown(row['mode'])}, {length_of(row)}: "
        f"{row['failures']} of {row['requests']} requests failed, such as: {shown(row['error'])}</p>"
        for row in failed
    ]


def _links(record: dict[str, Any]) -> list[str]:
    head = ["link", "profile", "nominal ms", "p50 ms", "least ms", "most ms", "over nominal ms"]
    body = [
        [
            f"{shown(link['source'])} - {shown(link['destination'])}",
            shown(link["profile"]),
            *(f"{link[key]:.2f}" for key in ("nominal_ms", "p50_ms", "least_ms", "most_ms")),
            f"{link['p50_ms'] - link['nominal_ms']:.2f}",
        ]
        for link in record["links"]
    ]
    parts = [
        "<h2>What the lab itself costs</h2>",
        "<p>Round trips of 64 bytes on plain sockets, against what the profile promises.</p>",
        html_table(head, body, text_columns=2),
    ]
    if record["control"]:
        parts += ["<p>The same requests, in turns, in the lab's fastest network and on plain loopback.</p>"]
        parts += [_table(record["control"])]
    return parts
