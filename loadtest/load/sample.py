"""One request as its user saw it, and the class that it falls into."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OK = "OK"
OPEN = "OPEN"
"""Not a gRPC status: no answer and no status came, and the run waited no longer."""
CUT = "CUT"
"""Not a gRPC status: the run was stopped, or its user taken away, while there was still time for an answer."""


class Outcome(StrEnum):
    """What became of a request. Exactly one is true of each."""

    RIGHT = "right"
    """Answered with the text that the same seed gives alone."""
    WRONG = "wrong"
    """Answered with another text."""
    REFUSED = "refused"
    """Told to come back, and when."""
    FAILED = "failed"
    """Any other error status."""
    LOST = "lost"
    """Neither answer nor status."""
    CUT = "cut"
    """The user was taken away first, by Ctrl-C or from locust's page: nothing can be said."""


@dataclass(frozen=True)
class Sample:
    """A request. Times are seconds on the load generator's own clock."""

    case: int
    begin_s: float
    end_s: float
    status: str
    """Name of a gRPC status, OPEN or CUT."""
    own_status: bool = False
    """Whether the user's side made the status up, because the router sent none."""
    retry_after_ms: int | None = None
    message: str = ""
    output: str = ""
    """The bytes of the answer, in hex."""

    @property
    def latency_ms(self) -> float:
        return (self.end_s - self.begin_s) * 1000


def outcome_of(sample: Sample, expected: bytes | None) -> Outcome:
    """:param expected: the text of the sample's case alone; None only where nothing was answered."""
    match sample.status:
        case "OK":
            return Outcome.RIGHT if bytes.fromhex(sample.output) == expected else Outcome.WRONG
        case "OPEN":
            return Outcome.LOST
        case "CUT":
            return Outcome.CUT
        # a router that sends this itself has answered: that is a failure, not a loss
        case "DEADLINE_EXCEEDED" if sample.own_status:
            return Outcome.LOST
        case "RESOURCE_EXHAUSTED" if sample.retry_after_ms is not None:
            return Outcome.REFUSED
    return Outcome.FAILED
