"""The ledger of a training under faults: how long each fault kept work away, and why updates did not count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtest.faults.base import FaultRecord
from loadtest.faults.training_faults import COORDINATOR
from loadtest.faults.training_observer import LogEntry

NOT_TAKEN = re.compile(r"round \d+ of \S+ was not taken: (.+)")
GIVEN_UP = re.compile(r"round \d+ was closed without us")
DIGITS = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?")


@dataclass(frozen=True)
class TrainingFaultRecord(FaultRecord):
    """A fault that was done to a training."""

    part: str = ""  # that its worker trains; empty for the coordinator, where any part counts
    note: str = ""
    accepted_s: float | None = None  # from its begin to the next update that was accepted for the part
    merged_s: float | None = None  # from its begin to the next merge of the part
    # From its end to the next update of its target that was accepted; of any worker's for the coordinator.
    back_s: float | None = None


@dataclass(frozen=True)
class FaultWaits:
    """The waits after one kind of fault."""

    kind: str
    faults: int = 0
    accepted_s: list[float] = field(default_factory=list)
    merged_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


def with_waits(fault: TrainingFaultRecord, entries: Sequence[LogEntry]) -> TrainingFaultRecord:
    """A fault with the waits that the log shows after it."""

    def first(kind: str, since_s: float, worker: str = "") -> float | None:
        for entry in entries:
            ours = entry.kind == kind and fault.part in ("", entry.part)
            if ours and entry.at_s > since_s and (not worker or entry.record["worker"] == worker):
                return entry.at_s - since_s
        return None

    return replace(
        fault,
        accepted_s=first("accepted", fault.begin_s),
        merged_s=first("closed", fault.begin_s),
        back_s=first("accepted", fault.end_s, "" if fault.target == COORDINATOR else fault.target),
    )


def waits_by_kind(faults: Iterable[TrainingFaultRecord]) -> list[FaultWaits]:
    """In the order in which the kinds came first."""
    found: dict[str, FaultWaits] = {}
    for fault in faults:
        known = found.get(fault.kind, FaultWaits(fault.kind))
        for name in ("accepted_s", "merged_s", "back_s"):
            if (seconds := getattr(fault, name)) is not None:
                getattr(known, name).append(seconds)
        found[fault.kind] = replace(known, faults=known.faults + 1)
    return list(found.values())


def outcomes_by_lie(verdicts: Iterable[dict[str, Any]]) -> dict[str, Counter[str]]:
    """The outcomes of byzantine workers' updates."""
    found: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        found.setdefault(verdict["lie"], Counter())[verdict["outcome"]] += 1
    return found


def refusals(logs: Iterable[Path]) -> Counter[str]:
    """Why rounds of honest workers did not count, without the numbers."""
    found: Counter[str] = Counter()
    for log in logs:
        words = log.read_text(errors="replace") if log.exists() else ""
        found.update(DIGITS.sub("N", reason) for reason in NOT_TAKEN.findall(words))
        if given_up := len(GIVEN_UP.findall(words)):
            found["given up by its worker, for the round was closed long ago"] += given_up
    return found
