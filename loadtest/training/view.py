"""A run as its coordinator tells it: a line of `onesweep rounds --json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

FINISHED = "RUN_STATE_FINISHED"


@dataclass(frozen=True)
class PartView:
    """A part of the model."""

    name: str
    round: int
    """That is open; also the number of merges."""
    present: int
    """Workers with a lease."""
    arrived: int
    losses: dict[str, float]


@dataclass(frozen=True)
class WorkerView:
    """Who has a place; figures of a worker are of its last process, as it told them."""

    name: str
    part: int
    replica: int
    doing: str
    """`waiting`, `fetching`, `training`, `sending`; empty where it said nothing yet."""
    round: int
    steps: int
    gone: bool
    late: bool
    accepted: int
    """Updates, since the coordinator started."""
    refused: int
    sent_bytes: int
    received_bytes: int
    busy_s: float
    problem: str


@dataclass(frozen=True)
class View:
    """The run at one moment."""

    at_s: float
    """When it was heard, seconds of the monotonic clock."""
    run: str
    finished: bool
    rounds: int
    """In all."""
    received_bytes: int
    sent_bytes: int
    problem: str
    parts: tuple[PartView, ...]
    workers: tuple[WorkerView, ...]

    @property
    def least_round(self) -> int:
        """Rounds that every part has made."""
        return min((part.round for part in self.parts), default=0)

    def worker(self, name: str) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.name == name), None)

    @classmethod
    def parse(cls, line: str, at_s: float) -> View:
        """JSON in which what is 0, false or empty may be missing. Raises ValueError for what is none."""
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"{line[:80]!r} is not a look at a run")
        return cls(
            at_s,
            record.get("run", ""),
            record.get("state") == FINISHED,
            int(record.get("rounds", 0)),
            int(record.get("received_bytes", 0)),
            int(record.get("sent_bytes", 0)),
            record.get("problem", ""),
            tuple(map(_part, record.get("parts", []))),
            tuple(map(_worker, record.get("workers", []))),
        )


def _part(record: dict[str, Any]) -> PartView:
    return PartView(
        record.get("name", ""),
        int(record.get("round", 0)),
        int(record.get("present", 0)),
        int(record.get("arrived", 0)),
        dict(record.get("losses", {})),
    )


def _worker(record: dict[str, Any]) -> WorkerView:
    return WorkerView(
        record.get("worker", ""),
        int(record.get("part", 0)),
        int(record.get("replica", 0)),
        record.get("doing", "").removeprefix("DOING_").lower(),
        int(record.get("round", 0)),
        int(record.get("steps", 0)),
        bool(record.get("gone", False)),
        bool(record.get("late", False)),
        int(record.get("accepted", 0)),
        int(record.get("refused", 0)),
        int(record.get("sent_bytes", 0)),
        int(record.get("received_bytes", 0)),
        float(record.get("busy_seconds", 0.0)),
        record.get("problem", ""),
    )
