"""On which thread an engine computes: quick steps at once, all else on its own."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from stages.host import scheduler as engines
from stages.host.parts import Parts
from stages.host.scheduler import ScheduledHop, Scheduler
from stages.host.sessions import SessionStore
from stages.host.validation import parse_hop
from stages.v1 import stage_pb2
from tests.stages.hops import Hops, Make, scores, steps, sweeps
from tests.stages.slow_runner import alone


def job_of(engine: Scheduler, parts: Parts, hops: Hops) -> ScheduledHop:
    """A request's first hop, submitted."""
    hop = next(hops)
    source = parts.plan.model(hop.router)
    assert source is not None
    session = SessionStore(1 << 30, 60.0).open("s", "r", hop.router, hop.capacity, source.manifest, parts)
    hop.digest = source.digest
    job = ScheduledHop(hop, parse_hop(hop, parts.plan), session, 0)
    engine.submit(job)
    return job


@dataclass
class Threaded:
    """An engine with its thread."""

    parts: Parts
    engine: Scheduler = field(default_factory=lambda: Scheduler(3, 64, 64))
    ended: SimpleQueue[ScheduledHop] = field(default_factory=SimpleQueue)

    def __enter__(self) -> Threaded:
        def deliver(jobs: list[ScheduledHop]) -> None:
            for job in jobs:
                self.ended.put(job)

        self.thread = threading.Thread(target=self.engine.run, args=(deliver,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.ended.empty()


def test_a_sweep_is_computed_on_the_thread_which_then_sleeps(loaded: dict[str, Parts]) -> None:
    with Threaded(loaded["own"]) as it:
        for _ in range(3):  # between them there is nothing to do
            job = job_of(it.engine, it.parts, sweeps())
            assert it.engine.go() == []
            assert it.ended.get(timeout=60) is job
            assert isinstance(job.result, stage_pb2.Event)


def test_a_quick_step_is_computed_at_once(loaded: dict[str, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "QUICK_MS", 1000.0)  # this machine may be busy
    engine, expected = Scheduler(3, 64, 64), alone(loaded["own"], steps(count=1))
    for _ in range(3):
        job = job_of(engine, loaded["own"], steps(count=1))
        assert engine.go() == [job]
        assert isinstance(job.result, stage_pb2.Event)
        assert job.result.text == expected
    assert len(engine) == 0


@pytest.mark.parametrize(
    ("hops", "quick_ms"),
    [
        (sweeps, engines.QUICK_MS),
        (lambda: steps(prompt=bytes(engines.QUICK_ROWS + 1)), engines.QUICK_MS),
        (scores, engines.QUICK_MS),
        (steps, 0.0),
    ],
    ids=["sweep", "long prompt", "candidates", "slow model"],
)
def test_what_may_take_long_is_left_to_the_thread(
    loaded: dict[str, Parts], monkeypatch: pytest.MonkeyPatch, hops: Make, quick_ms: float
) -> None:
    monkeypatch.setattr(engines, "QUICK_MS", quick_ms)
    engine = Scheduler(3, 64, 64)
    job = job_of(engine, loaded["own"], hops())
    assert (engine.go(), len(engine), job.result) == ([], 1, None)


def test_a_quick_step_joins_what_the_thread_is_at(loaded: dict[str, Parts]) -> None:
    """It shares the sweeps' next pass, instead of computing beside them."""
    engine = Scheduler(3, 64, 64)
    job_of(engine, loaded["own"], sweeps())
    engine._turn()  # the thread is between two passes
    job = job_of(engine, loaded["own"], steps())
    assert (engine.go(), len(engine)) == ([], 2)
    assert engine._turn() == [job]


def test_hops_may_be_taken_in_while_they_are_looked_at(loaded: dict[str, Parts]) -> None:
    engine = Scheduler(3, 64, 64)
    first, second = (job_of(engine, loaded["own"], steps(seed=i)) for i in range(2))

    class Seen:
        """A session whose hop the scheduler's thread takes in while the event loop looks at it."""

        @property
        def pending(self) -> int:
            engine._arrived.clear()
            return 1

    first.session = Seen()  # type: ignore[assignment]
    assert engine._is_quick()
    assert len(engine) == 0
    assert second.result is None
