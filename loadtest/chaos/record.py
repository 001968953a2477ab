"""A run as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loadtest.chaos.account import fate_of, stalls, tallies
from loadtest.chaos.run import ChaosResult
from loadtest.chaos.slope import Slope
from loadtest.chaos.table import verdict
from loadtest.machine import Machine


def chaos_record(result: ChaosResult, command: str, commit: str, machine: Machine) -> dict[str, Any]:
    """Times are seconds since the run began."""
    begin_s, settings = result.begin_s, result.settings
    return {
        "command": command,
        "commit": commit,
        "machine": asdict(machine),
        "profile": settings.profile,
        "seed": settings.seed,
        "requests_at_once": settings.at_once,
        "patience_s": settings.patience_s,
        "seconds": result.end_s - begin_s,
        "verdict": verdict(result),
        "modes": {mode: asdict(each) for mode, each in tallies(result.answers, result.cases, result.texts).items()},
        "faults": [
            {
                "kind": fault.kind,
                "target": fault.target,
                "begin_s": fault.begin_s - begin_s,
                "end_s": fault.end_s - begin_s,
                "sound_s": None if fault.sound_s is None else fault.sound_s - begin_s,
            }
            for fault in result.happened
        ],
        "stalls": {s.kind: {"faults": s.faults, "waits_s": s.waits_s} for s in stalls(result.answers, result.happened)},
        "processes": {
            name: {
                "seconds": life.seconds,
                "most_rss_kb": max(life.rss_kb),
                "most_descriptors": max(life.descriptors),
                "rss_kb_per_minute": _slope(life.memory_slope),
                "descriptors_per_minute": _slope(life.descriptor_slope),
            }
            for name, life in result.longest.items()
        },
        "sessions_left": result.sessions_left,
        "unusable": result.unusable,
        "ended": result.ended,
        "audit": {"share": settings.audit, "audited": result.audited, "accused": result.accused},
        "requests": [
            {
                "mode": result.cases[answer.case].mode,
                "begin_s": answer.begin_s - begin_s,
                "end_s": answer.end_s - begin_s,
                "fate": fate_of(answer, result.texts).value,
                "replays": answer.replays,
                "calls": [each.code for each in answer.tries],
                "flood": not answer.first,
            }
            for answer in result.answers
        ],
    }


def _slope(slope: Slope | None) -> list[float] | None:
    """With half the width of its 95 % interval."""
    return None if slope is None else [slope.per_minute, slope.margin]
