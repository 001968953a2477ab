"""A flood in words and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loadtest.chaos.flood import AIM_GOODPUT, AIM_REFUSAL_MS, FloodResult
from loadtest.load.table import milliseconds
from loadtest.machine import Machine


def flood_notes(result: FloodResult) -> list[str]:
    """A sentence a line."""
    figures, knee = result.flood.figures, result.knee
    held = "holds" if result.goodput >= AIM_GOODPUT else "does not hold"
    notes = [
        f"knee: {knee.users} users, {knee.figures.throughput_rps:.2f} right answers a second",
        f"{result.flood.users} users: {100 * result.goodput:.0f} % of the knee's right answers a second; the aim of "
        f"{100 * AIM_GOODPUT:.0f} % {held}",
    ]
    if figures.refusal_p95_ms is None:
        notes.append("nobody was refused: the router takes as many requests at once (its --max-requests)")
    else:
        quick = "holds" if figures.refusal_p95_ms < AIM_REFUSAL_MS else "does not hold"
        notes.append(
            f"{figures.counts.refused} refusals after {milliseconds(figures.refusal_p50_ms)} ms (p50), "
            f"{milliseconds(figures.refusal_p95_ms)} ms (p95); the aim of {AIM_REFUSAL_MS:g} ms {quick}"
        )
    if result.polite is not None and result.polite_share is not None:
        keys = "its key gets the next free place" if result.settings.polite_token else "without --keys it is one of all"
        notes.append(
            f"a second crowd, of {result.polite.users}, keeps {100 * result.polite_share:.0f} % of the right answers a "
            f"second that it has by itself: {keys}, and then shares the hosts with the requests that the router takes "
            "at once (--max-requests)"
        )
    return notes


def flood_record(result: FloodResult, command: str, commit: str, machine: Machine) -> dict[str, Any]:
    rows = {"knee": result.knee, "calm": result.calm, "flood": result.flood, "polite": result.polite}
    return {
        "command": command,
        "commit": commit,
        "machine": asdict(machine),
        "mode": result.settings.load.mode,
        "at": result.settings.at,
        "goodput": result.goodput,
        "polite_share": result.polite_share,
        "missed": result.missed,
        **{name: {"users": r.users, **asdict(r.figures)} for name, r in rows.items() if r is not None},
    }
