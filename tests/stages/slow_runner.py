"""A host's engine, pass by pass, and parts that write down what is asked of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, StageRunner
from stages.host.parts import Parts
from stages.host.scheduler import ScheduledHop, Scheduler
from stages.host.sessions import SessionStore
from stages.host.validation import parse_hop
from stages.v1 import stage_pb2
from stages.wire.status import StatusError
from tests.stages.hops import Hops


class Paced(Scheduler):
    """Runs on the thread of the test; hops arrive before the pass that they are due at."""

    def __init__(self, parts: Parts, **limits: int) -> None:
        super().__init__(**{"following": 3, "limit": 64, "most_hops": 64, **limits})
        self.parts, self.store = parts, SessionStore(1 << 30, 60.0)
        self.passes = 0
        self.due: list[tuple[int, ScheduledHop]] = []
        self.going: dict[int, tuple[str, Hops]] = {}
        self.texts: dict[str, bytes] = {}
        """Or scores."""
        self.order: list[tuple[str, int]] = []
        """The requests that got a result, and in which pass."""
        self.refusals: dict[str, StatusError] = {}
        self.handed_on: dict[str, stage_pb2.Hop] = {}
        """The hops for the next host, if there is one."""

    def begin(self, name: str, hops: Hops, at: int = 1) -> ScheduledHop:
        """A request whose first hop arrives before pass `at`."""
        self.texts[name] = b""
        return self._arrive(name, hops, next(hops), at)

    def finish(self) -> dict[str, bytes]:
        """Every request's text."""
        self.run(self._deliver)
        return self.texts

    def _arrive(self, name: str, hops: Hops, hop: stage_pb2.Hop, at: int) -> ScheduledHop:
        kind, session = hop.router, self.store.sessions.get(hop.session)
        if session is None:
            session = self.store.open(hop.session, "r", kind, hop.capacity, self.parts, 0.0)
        sent = stage_pb2.Hop()
        sent.CopyFrom(hop)
        sent.digest = self.parts.plan.models[kind].digest
        job = ScheduledHop(parse_hop(sent, self.parts.plan), session, 0, float("inf"))
        self.going[id(job)] = name, hops
        self.due.append((at, job))
        return job

    def _wait(self) -> bool:
        self.passes += 1
        for entry in [entry for entry in self.due if entry[0] <= self.passes]:
            self.due.remove(entry)
            self.submit(entry[1])
        return bool(len(self) or self.due)

    def _deliver(self, jobs: list[ScheduledHop]) -> None:
        for job in jobs:
            name, hops = self.going.pop(id(job))
            self.order.append((name, self.passes))
            if isinstance(job.result, StatusError):
                self.refusals[name] = job.result
                continue
            if isinstance(job.result, stage_pb2.Hop):
                self.handed_on[name] = job.result
                continue
            self.texts[name] += job.result.text + job.result.scores.nats
            try:
                following = hops.send(job.result)
            except StopIteration:
                continue
            self._arrive(name, hops, following, self.passes + 1)


@dataclass
class Watched(BlockRunner, StageRunner):
    """A part that writes down the pieces of every call, and fails on demand."""

    runner: Any
    calls: list[tuple[str, list[Any]]] = field(default_factory=list)
    fails: Callable[[str, Sequence[Any]], bool] = lambda method, pieces: False

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return self._call("read", pieces)

    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return self._call("branch", pieces)

    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return self._call("denoise", pieces)

    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return self._call("next_byte", hidden)

    def _call(self, method: str, pieces: Sequence[Any]) -> Any:
        self.calls.append((method, list(pieces)))
        if self.fails(method, pieces):
            raise RuntimeError("boom")
        return getattr(self.runner, method)(pieces)

    def counts(self, method: str) -> list[int]:
        """Pieces in each call of a method."""
        return [len(pieces) for called, pieces in self.calls if called == method]


def watched(parts: Parts, part: int, kind: str = "chain") -> Watched:
    runner: Any = parts.runners["chain"][part] if kind == "chain" else parts.runners["ar"][part]
    assert isinstance(runner, Watched)
    return runner


def alone(parts: Parts, hops: Hops) -> bytes:
    engine = Paced(parts)
    engine.begin("it", hops)
    return engine.finish()["it"]
