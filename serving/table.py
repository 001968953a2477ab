"""Results side by side, for a terminal."""

from __future__ import annotations

import textwrap

from serving.client import Result

TEXT_WIDTH = 100

_COLUMNS = ("mode", "latency", "first byte", "sweeps", "hops", "wire bytes", "compute", "host-seconds")


def comparison(prompt: str, outcomes: dict[str, Result | str]) -> str:
    """A table of what each mode cost, and its text; a mode that failed has its error in place of figures."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for mode, outcome in outcomes.items():
        rows.append(_row(outcome) if isinstance(outcome, Result) else (mode, outcome))
    widths = [max(len(row[i]) for row in rows if len(row) == len(_COLUMNS)) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for mode, outcome in outcomes.items():
        if isinstance(outcome, Result):
            lines += ["", f"{mode}:", _wrapped(prompt, outcome.text)]
    return "\n".join(lines)


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.mode,
        f"{result.latency_ms:.0f} ms",
        f"{result.first_byte_ms:.0f} ms",
        str(result.sweeps),
        str(result.hops),
        f"{result.wire_bytes_total:,}",
        f"{result.compute_ms:.0f} ms",
        f"{result.host_seconds:.3f}",
    )


def _wrapped(prompt: str, text: str) -> str:
    shown = printable(prompt) + "|" + printable(text)
    return textwrap.indent("\n".join(textwrap.wrap(shown, TEXT_WIDTH, drop_whitespace=False)), "  ")


def printable(text: str, newline: str = "⏎") -> str:
    """Text that cannot move the cursor or colour the screen: control characters are shown as symbols."""
    return "".join(newline if c == "\n" else c if c.isprintable() else "�" for c in text)
