"""The report: the picture, both tables, and how they were measured."""

from __future__ import annotations

from typing import Any

from loadtest.frontier.picture import frontier_picture
from loadtest.frontier.points import AutoPoint, Point
from loadtest.frontier.table import failures
from loadtest.page import html_page, html_pairs, html_table, shown

_READING = """A point is a mode with its settings: how long a text takes (median, at the client, one request at a time)
and how many bits a judge, a stronger model trained apart, needs for a byte of it. Fewer bits are better only while the
text is as varied as human text. The line joins the points that nothing beats in both. A star is mode <b>auto</b>, the
bar right of it its budget."""


def frontier_page(record: dict[str, Any]) -> str:
    """The whole page, from the record of a run."""
    points, auto = _of(record)
    svg = record_picture(record).replace("<svg", '<svg role="img" aria-label="quality against seconds"', 1)
    title = "onesweep: quality against seconds"
    problems = [*failures(points), *failures(auto), *record["problems"], *record["left_out"]]
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{_READING}</p><pre>{shown(record['command'])}</pre>",
        f"<figure>{svg}</figure>",
        "<h2>Every setting</h2>",
        _points(points),
        "<h2>auto</h2>",
        _auto(auto),
        "".join(f"<p class='bad'>{shown(line)}</p>" for line in problems),
        "<h2>Settings</h2>",
        html_pairs(record["settings"] | {"judge": record["judge"], "bits": record["basis"]} | record["machine"]),
    ]
    return html_page(title, parts)


def record_picture(record: dict[str, Any]) -> str:
    """The picture alone, an SVG element."""
    return frontier_picture(*_of(record), record["human_bits"], record["basis"], record["judge"])


def _of(record: dict[str, Any]) -> tuple[list[Point], list[AutoPoint]]:
    points = [Point(**point) for point in record["points"]]
    return points, [AutoPoint(**{k: v for k, v in point.items() if k != "as_good"}) for point in record["auto"]]


def _points(points: list[Point]) -> str:
    head = [
        "profile",
        "mode",
        "seconds",
        "p95",
        "judge bits",
        "interval",
        "exact bits",
        "sweeps",
        "host-s",
        "router-s",
        "wire bytes",
    ]
    body = []
    for p in points:
        interval = "-" if p.bits_low is None or p.bits_high is None else f"{p.bits_low:.3f} … {p.bits_high:.3f}"
        name = shown(p.spec)
        seconds = [_number(value, 2) for value in (p.seconds, p.seconds_p95)]
        costs = [
            _number(p.exact_bits, 3),
            _number(p.sweeps, 1),
            _number(p.host_seconds, 3),
            _number(p.router_seconds, 3),
        ]
        row = [p.profile, f"<b>{name}</b>" if p.pareto else name, *seconds, f"{p.bits:.3f}", interval, *costs]
        body.append([*row, _number(p.wire_bytes, 0)])
    return html_table(head, body, text_columns=2)


def _auto(points: list[AutoPoint]) -> str:
    head = ["profile", "picked", "budget, s", "seconds", "worst / budget", "kept", "bits", "best fixed", "its bits"]
    body = []
    for p in points:
        picked = ", ".join(f"{label} ({count})" for label, count in p.picked.items()) or p.error or "-"
        times = [f"{p.budget_ms / 1000:.2f}", _number(p.seconds, 2), _number(p.worst, 2)]
        kept = {True: "yes", False: "<span class='bad'>no</span>", None: "-"}[p.kept]
        fixed = [_number(p.bits, 3), shown(p.best_fixed or "none"), _number(p.best_fixed_bits, 3)]
        body.append([p.profile, shown(picked), *times, kept, *fixed])
    return html_table(head, body, text_columns=2)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
