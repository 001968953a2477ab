"""On which thread an engine computes: quick steps at once, all else on its own."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from stages import engine as engines
from stages.engine import Engine, Job
from stages.parts import Parts
from stages.sessions import SessionStore
from stages.v1 import stage_pb2
from tests.stages.hops import Hops, Make, scores, steps, sweeps
from tests.stages.paced import alone


def job_of(engine: Engine, parts: Parts, hops: Hops) -> Job:
    """A request's first hop, submitted."""
    hop = next(hops)
    source = parts.plan.model(hop.router)
    assert source is not None
    session = SessionStore(1 << 30, 60.0).open("s", "r", hop.router, hop.capacity, source.manifest, parts)
    job = Job(hop, session, 0)
    engine.submit(job)
    return job


@dataclass
class Threaded:
    """An engine with its thread."""

    parts: Parts
    engine: Engine = field(default_factory=lambda: Engine(3, 64, 64))
    ended: SimpleQueue[Job] = field(default_factory=SimpleQueue)

    def __enter__(self) -> Threaded:
        def deliver(jobs: list[Job]) -> None:
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
    engine, expected = Engine(3, 64, 64), alone(loaded["own"], steps(count=1))
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
    engine = Engine(3, 64, 64)
    job = job_of(engine, loaded["own"], hops())
    assert (engine.go(), len(engine), job.result) == ([], 1, None)


def test_a_quick_step_joins_what_the_thread_is_at(loaded: dict[str, Parts]) -> None:
    """It shares the sweeps' next pass, instead of computing beside them."""
    engine = Engine(3, 64, 64)
    job_of(engine, loaded["own"], sweeps())
    engine._turn()  # the thread is between two passes
    job = job_of(engine, loaded["own"], steps())
    assert (engine.go(), len(engine)) == ([], 2)
    assert engine._turn() == [job]


def test_hops_may_be_taken_in_while_they_are_looked_at(loaded: dict[str, Parts]) -> None:
    engine = Engine(3, 64, 64)
    first, second = (job_of(engine, loaded["own"], steps(seed=i)) for i in range(2))

    class Seen:
        """A hop that the engine's thread takes in while the event loop looks at it."""

        step = first.hop.step

        def WhichOneof(self, group: str) -> str:
            engine._arrived.clear()
            return "step"

    first.hop = Seen()  # type: ignore[assignment]
    assert engine._is_quick()
    assert len(engine) == 0
    assert second.result is None
