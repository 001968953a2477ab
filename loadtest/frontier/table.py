"""Figures as markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.frontier.points import AutoPoint, Point


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
        costs = [_number(first.exact_bits, 3), _number(first.host_seconds, 2), _number(first.router_seconds, 2)]
        rows.append([f"`{spec}`", _number(first.sweeps, 0), *seconds, _bits(first), *costs])
    if human_bits is not None:
        rows.append(["human text", "", *("" for _ in profiles), f"{human_bits:.3f}", "", "", ""])
    return markdown(header, rows)


def auto_table(points: Sequence[AutoPoint]) -> str:
    """A row for each budget."""
    header = ["profile", "budget s", "s", "worst / budget", "kept", "picked", "bits", "best fixed that fits", "bits"]
    rows = []
    for point in points:
        picked = ", ".join(f"`{label}`" for label in point.picked) or point.error or "-"
        picked += f" ({point.hurried} of {point.requests} finished by another)" if point.hurried else ""
        fixed = f"`{point.best_fixed}`" if point.best_fixed else "none"
        cells = [point.profile, f"{point.budget_ms / 1000:.2f}", _number(point.seconds, 2), _number(point.worst, 2)]
        kept = {True: "yes", False: "no", None: "-"}[point.kept]
        rows.append([*cells, kept, picked, _number(point.bits, 3), fixed, _number(point.best_fixed_bits, 3)])
    return markdown(header, rows)


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


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, figures to the right."""
    lines = ["|---|" + "---:|" * (len(header) - 1)]
    lines = [_line(header), *lines, *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


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


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
