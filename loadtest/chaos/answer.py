"""What a client saw of one request, and what a router says of its hosts: JSON, one message a line.

Times are seconds of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

OK = "OK"
LATE = "LATE"
"""No whole answer within the request's patience, however often it was tried."""


@dataclass(frozen=True)
class Try:
    """One call that brought no whole answer."""

    begin_s: float
    end_s: float
    code: str
    message: str
    retry_after_ms: int | None = None
    output: str = ""
    """What had come until then, in hex."""

    @property
    def refused(self) -> bool:
        """Told to come back, and when."""
        return self.code == "RESOURCE_EXHAUSTED" and self.retry_after_ms is not None


@dataclass(frozen=True)
class Answer:
    """A request from its first call to its end."""

    case: int
    begin_s: float
    end_s: float
    status: str
    """OK, LATE, or the name of a gRPC status that another call would not change."""
    output: str = ""
    """Of the last call, in hex."""
    arrivals_s: list[float] = field(default_factory=list)
    """When pieces of text came, in all calls."""
    tries: list[Try] = field(default_factory=list)
    """Calls before the last one, and the last one too where it failed."""
    replays: int = 0
    """Times that the router moved the work to other hosts."""
    first: bool = True
    """Of the steady load; not of a flood."""

    @property
    def text(self) -> bytes:
        return bytes.fromhex(self.output)


@dataclass(frozen=True)
class Health:
    """What the router said of its hosts."""

    at_s: float
    problems: dict[str, str]
    """Why a host, or a link of it, cannot be used, by the host's name; `router` where that does not answer."""
    sessions: int = 0
    """Open on all hosts."""
    modes: list[str] = field(default_factory=list)
    """That are served."""
    context_bytes: int = 0
    audited: int = 0
    """Sweeps that were computed again since the router started."""
    liars: int = 0
    """Hosts that audits took out."""


Message = Answer | Health
_KINDS: dict[str, type[Message]] = {"answer": Answer, "health": Health}


def to_line(message: Message) -> str:
    return json.dumps({"kind": type(message).__name__.lower(), **asdict(message)}) + "\n"


def from_line(line: str) -> Message:
    """Raises ValueError for a line that is no message."""
    table: dict[str, Any] = json.loads(line)
    try:
        kind = _KINDS[table.pop("kind")]
        if kind is Answer:
            table["tries"] = [Try(**each) for each in table["tries"]]
        return kind(**table)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of the clients: {line!r}") from error
