"""What the load generator is told, and what it tells: JSON, one message a line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.load.access import Access
from loadtest.load.prompts import Case
from loadtest.load.sample import Sample

GRACE_S = 5.0
"""How long after its deadline a request may still be answered before it counts as lost."""


@dataclass(frozen=True)
class LoadPlan:
    """One run of the load generator."""

    access: Access
    mode: str
    max_bytes: int
    cases: tuple[Case, ...]
    users: int
    spawn_rate: float
    """Users started a second."""
    warm_up_s: float
    """From the moment that all users are there to the window."""
    seconds: float
    """Length of the window."""
    timeout_s: float
    """Deadline of a request."""
    grace_s: float = GRACE_S
    token: str = ""
    """Who asks; empty: whoever $ONESWEEP_TOKEN names."""
    web_fd: int | None = None
    """A listening socket for locust's page; None = no page."""

    @property
    def patience_s(self) -> float:
        """How long a user waits for an answer or a status."""
        return self.timeout_s + self.grace_s

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoadPlan:
        table = json.loads(text)
        cases = tuple(Case(**case) for case in table.pop("cases"))
        return cls(Access(**table.pop("access")), cases=cases, **table)


@dataclass(frozen=True)
class Window:
    """The part of a run that is measured, seconds on the load generator's clock."""

    begin_s: float
    end_s: float
    processor_s: float
    """Processor time that the load generator took in it."""
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def holds(self, sample: Sample) -> bool:
        """Whether the request began in the window."""
        return self.begin_s <= sample.begin_s < self.end_s


@dataclass(frozen=True)
class Drained:
    """Every request of the run has ended: what was read until now is complete."""


Message = Sample | Window | Drained
_KINDS: dict[str, type[Message]] = {"sample": Sample, "window": Window, "drained": Drained}


def to_line(message: Message) -> str:
    return json.dumps({"kind": type(message).__name__.lower(), **asdict(message)}) + "\n"


def from_line(line: str) -> Message:
    """Raises ValueError for a line that is no message."""
    table: dict[str, Any] = json.loads(line)
    try:
        return _KINDS[table.pop("kind")](**table)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of the load generator: {line!r}") from error
