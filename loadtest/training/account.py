"""What became of a training under faults: how long each kept work away, and what lies and lost rounds came to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtest.training.faults import COORDINATOR
from loadtest.training.journal import Entry

NOT_TAKEN = re.compile(r"round \d+ of \S+ was not taken: (.+)")
GIVEN_UP = re.compile(r"round \d+ was closed without us")
DIGITS = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?")


@dataclass(frozen=True)
class Happened:
    """A fault that was. Times are seconds of the monotonic clock."""

    kind: str
    target: str
    part: str
    """Whose worker it was done to; empty for the coordinator, where any part counts."""
    begin_s: float
    end_s: float
    note: str = ""
    accepted_s: float | None = None
    """From its begin to the next update that was accepted for the part."""
    merged_s: float | None = None
    """From its begin to the next merge of the part."""
    back_s: float | None = None
    """From its end to the next update of its target that was accepted; of anybody's for the coordinator."""


@dataclass(frozen=True)
class Waits:
    """Of one kind of fault."""

    kind: str
    faults: int = 0
    accepted_s: list[float] = field(default_factory=list)
    merged_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


def with_waits(happened: Happened, entries: Sequence[Entry]) -> Happened:
    """A fault with what the log says of the time after it."""

    def first(kind: str, since_s: float, worker: str = "") -> float | None:
        for entry in entries:
            ours = entry.kind == kind and happened.part in ("", entry.part)
            if ours and entry.at_s > since_s and (not worker or entry.record["worker"] == worker):
                return entry.at_s - since_s
        return None

    return replace(
        happened,
        accepted_s=first("accepted", happened.begin_s),
        merged_s=first("closed", happened.begin_s),
        back_s=first("accepted", happened.end_s, "" if happened.target == COORDINATOR else happened.target),
    )


def waits(happened: Iterable[Happened]) -> list[Waits]:
    """By kind, in the order in which they came first."""
    found: dict[str, Waits] = {}
    for fault in happened:
        known = found.get(fault.kind, Waits(fault.kind))
        for name in ("accepted_s", "merged_s", "back_s"):
            if (seconds := getattr(fault, name)) is not None:
                getattr(known, name).append(seconds)
        found[fault.kind] = replace(known, faults=known.faults + 1)
    return list(found.values())


def lies_told(verdicts: Iterable[dict[str, Any]]) -> dict[str, Counter[str]]:
    """What became of a saboteur's updates, by lie."""
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
