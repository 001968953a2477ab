"""Results side by side, for a terminal."""

from __future__ import annotations

import textwrap

from serving.client import Result

TEXT_WIDTH = 100

_COLUMNS = ("mode", "latency", "first byte", "sweeps", "hops", "wire bytes", "compute", "host-seconds")


def comparison(prompt: str, outcomes: dict[str, Result | str], suffix: str = "") -> str:
    """A table of what each mode cost, and its text; a mode that failed has its error in place of figures."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for mode, outcome in outcomes.items():
        rows.append(_row(mode, outcome) if isinstance(outcome, Result) else (mode, outcome))
    widths = [max(len(row[i]) for row in rows if len(row) == len(_COLUMNS)) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for mode, outcome in outcomes.items():
        if isinstance(outcome, Result):
            lines += ["", f"{mode}:", _wrapped(prompt, outcome.text, suffix if outcome.mode == "infill" else "")]
    return "\n".join(lines)


def titled(label: str, result: Result) -> str:
    """What was asked for, and the mode that came of it where that is another."""
    return label if label.partition(":")[0] == result.mode else f"{label}: {result.mode}"


def _row(mode: str, result: Result) -> tuple[str, ...]:
    return (
        titled(mode, result),
        f"{result.latency_ms:.0f} ms",
        f"{result.first_byte_ms:.0f} ms",
        str(result.sweeps),
        str(result.hops),
        f"{result.wire_bytes_total:,}",
        f"{result.compute_ms:.0f} ms",
        f"{result.host_seconds:.3f}",
    )


def _wrapped(prompt: str, text: str, suffix: str) -> str:
    shown = "|".join(printable(part) for part in (prompt, text, *([suffix] if suffix else [])))
    return textwrap.indent("\n".join(textwrap.wrap(shown, TEXT_WIDTH, drop_whitespace=False)), "  ")


def printable(text: str, newline: str = "⏎") -> str:
    """Text that cannot move the cursor or colour the screen: control characters are shown as symbols."""
    return "".join(newline if c == "\n" else c if c.isprintable() else "�" for c in text)
