"""The plan for the load generator, and the recording that it returns: a line of JSON each."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from loadtest.commands import MAX_SEED
from loadtest.workload.caller import Access
from loadtest.workload.prompts import SeededPrompt
from loadtest.workload.testbed import TestbedSettings
from stages.settings import setting

# One request on its user's side, and its class.

OK = "OK"
OPEN = "OPEN"  # not a gRPC status: neither answer nor status came before the run stopped waiting


class Outcome(StrEnum):
    """The class of a request; each has exactly one."""

    RIGHT = "right"  # answered with the text that the same seed gives when run alone
    WRONG = "wrong"  # answered with another text
    REFUSED = "refused"  # refused with a time to retry
    FAILED = "failed"  # any other error status
    LOST = "lost"  # neither answer nor status; under faults, no complete text with all its calls


@dataclass(frozen=True)
class LoadSample:
    """A request. Times are seconds on the load generator's clock."""

    case: int
    begin_s: float
    end_s: float
    status: str  # name of a gRPC status, or OPEN
    own_status: bool = False  # True: gRPC on the user's side made the status, because the router sent none
    retry_after_ms: int | None = None
    message: str = ""
    output: str = ""  # the bytes of the answer, in hex

    @property
    def latency_ms(self) -> float:
        return (self.end_s - self.begin_s) * 1000


def outcome_of(sample: LoadSample, expected: bytes | None) -> Outcome:
    """:param expected: the text of the sample's case when run alone; None only without an answer."""
    match sample.status:
        case "OK":
            return Outcome.RIGHT if bytes.fromhex(sample.output) == expected else Outcome.WRONG
        case "OPEN":
            return Outcome.LOST
        # if the router itself sent it, the request failed and is not lost
        case "DEADLINE_EXCEEDED" if sample.own_status:
            return Outcome.LOST
        case "RESOURCE_EXHAUSTED" if sample.retry_after_ms is not None:
            return Outcome.REFUSED
    return Outcome.FAILED


MAX = 1_000_000  # anything above is a typing error
GRACE_S = 5.0  # time after its deadline in which an answer still counts; later the request is lost


@dataclass(frozen=True)
class LoadPlan:
    access: Access
    mode: str
    max_bytes: int
    cases: tuple[SeededPrompt, ...]
    users: int
    warm_up_s: float  # from the arrival of all users to the window
    seconds: float  # length of the window
    timeout_s: float  # deadline of a request
    grace_s: float = GRACE_S

    @property
    def patience_s(self) -> float:
        """A user's longest wait for an answer or a status."""
        return self.timeout_s + self.grace_s

    @classmethod
    def from_json(cls, text: str) -> Self:
        table = json.loads(text)
        cases = tuple(SeededPrompt(**case) for case in table.pop("cases"))
        return cls(Access(**table.pop("access")), cases=cases, **table)


@dataclass(frozen=True)
class LoadSettings:
    target: TestbedSettings = field(default_factory=TestbedSettings)
    modes: tuple[str, ...] = setting(("sweep",), "modes, one run each", name="--mode", metavar="M[,M]")
    users: tuple[int, ...] = setting((8,), "numbers of users, one run each", metavar="U[,U]", minimum=1, maximum=MAX)
    seconds: float = setting(30.0, "length of the measurement", metavar="S", above=0, maximum=MAX)
    max_bytes: int = setting(128, "bytes to generate", name="--bytes", minimum=1, maximum=MAX)
    first_seed: int = setting(0, "first seed", name="--seed", metavar="S", minimum=0, maximum=MAX_SEED)
    cases: int = setting(64, "distinct texts that users request", name="--texts", minimum=1, maximum=MAX)
    warm_up_s: float = 3.0  # under load before the measurement
    timeout_s: float = 60.0  # deadline of a request

    def plan(self, access: Access, cases: tuple[SeededPrompt, ...], mode: str, users: int) -> LoadPlan:
        return LoadPlan(access, mode, self.max_bytes, cases, users, self.warm_up_s, self.seconds, self.timeout_s)


@dataclass(frozen=True)
class Window:
    """The measured part of a run, in seconds on the load generator's clock."""

    begin_s: float
    end_s: float
    processor_s: float  # the load generator's processor time

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def contains(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


@dataclass(frozen=True)
class Recording:
    """All requests of a run, and its window."""

    samples: list[LoadSample]
    window: Window

    @classmethod
    def from_json(cls, text: str) -> Self:
        table = json.loads(text)
        return cls([LoadSample(**sample) for sample in table["samples"]], Window(**table["window"]))
