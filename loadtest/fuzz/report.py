"""A run's result for people and for programs."""

from __future__ import annotations

from typing import Any

from loadtest.fuzz.run import FuzzResult
from loadtest.fuzz.settings import WIRE
from loadtest.machine import commit, this_machine
from loadtest.table import aligned

MOST_ANSWERS = 5


def fuzz_table(result: FuzzResult) -> str:
    """Inputs and the commonest answers of each target."""
    rows = []
    for tally in result.tallies:
        if tally.inputs:
            shown = ", ".join(f"{what} {count}" for what, count in tally.answers.most_common(MOST_ANSWERS))
            where = "sockets" if tally.target in WIRE else "in process"
            rows.append([tally.target, where, f"{tally.inputs}", f"{len(tally.findings)}", shown])
    return aligned(["target", "over", "inputs", "findings", "commonest answers"], rows)


def fuzz_notes(result: FuzzResult) -> list[str]:
    wired = sum(tally.inputs for tally in result.tallies if tally.target in WIRE)
    right = ", ".join(f"{mode} {count}" for mode, count in sorted(result.healthy_right.items()))
    notes = [
        f"{result.inputs} inputs, {wired} of them over sockets, in {result.seconds:.0f} s, "
        f"seed {result.settings.seed}, commit {commit()}",
        f"healthy requests with the right text: {sum(result.healthy_right.values())} ({right}); "
        f"told to come back later: {result.told_to_wait}",
        "most memory: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in result.rss_mb.items()),
        "most descriptors: " + ", ".join(f"{name} {count}" for name, count in result.descriptors.items()),
    ]
    return notes + [f"FOUND {f.count} x {f.target}: {f.what}" for f in result.findings]


def fuzz_record(result: FuzzResult) -> dict[str, Any]:
    return {
        "fuzz": 1,
        "commit": commit(),
        "machine": this_machine().sentence,
        "seed": result.settings.seed,
        "inputs": result.inputs,
        "seconds": result.seconds,
        "targets": [tally.to_record() for tally in result.tallies],
        "findings": [finding.to_record() for finding in result.findings],
        "healthy_right": result.healthy_right,
        "told_to_wait": result.told_to_wait,
        "rss_mb": result.rss_mb,
        "descriptors": result.descriptors,
    }
