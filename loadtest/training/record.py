"""A run as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loadtest.machine import Machine
from loadtest.training.run import TrainingResult
from loadtest.training.table import verdict


def training_record(result: TrainingResult, command: str, commit: str, machine: Machine) -> dict[str, Any]:
    """Times are seconds since the run began."""
    begin_s, settings = result.begin_s, result.settings
    return {
        "command": command,
        "commit": commit,
        "machine": asdict(machine),
        "profile": settings.profile,
        "seed": settings.seed,
        "run": result.run.text,
        "rounds": result.rounds,
        "lease_s": settings.lease_s,
        "seconds": result.end_s - begin_s,
        "verdict": verdict(result),
        "faults": [
            {**asdict(fault), "begin_s": fault.begin_s - begin_s, "end_s": fault.end_s - begin_s}
            for fault in result.happened
        ],
        "scores_nats": result.scores,
        "undisturbed": {"seconds": result.reference.seconds, "scores_nats": result.reference.scores},
        "proof": asdict(result.proof),
        "audit": result.audit,
        "finished": result.finished,
        "ended": result.ended,
        "sabotage": result.verdicts,
        "honest_refusals": dict(result.refused),
        "log": [{"at_s": entry.at_s - begin_s, **entry.record} for entry in result.entries],
    }
