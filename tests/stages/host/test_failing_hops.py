"""Hops that fail in an engine, and abandoned ones: they harm no other."""

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import pytest

from stages.host.parts import Parts
from stages.host.work.sweep import SweepWork
from stages.wire.status import StatusError, invalid
from tests.stages.hops import steps, sweeps
from tests.stages.slow_runner import Paced, alone, watched


def names_of(failed: Iterable[tuple[str, StatusError]], code: grpc.StatusCode) -> set[str]:
    return {name for name, refusal in failed if refusal.code is code}


@pytest.mark.parametrize("guilty", [None, "one"])
def test_hops_whose_pass_fails_are_computed_one_by_one(parts: Parts, guilty: str | None) -> None:
    """Block 1 fails for two together, and for one of them alone."""
    makes = {"one": sweeps, "two": lambda: sweeps(seed=1), "later": sweeps, "step": lambda: steps(count=9)}
    expected = {name: alone(parts, make()) for name, make in makes.items()}
    engine = Paced(parts)
    jobs = {name: engine.begin(name, make(), at=3 if name == "later" else 1) for name, make in makes.items()}
    bad = jobs[guilty].session.caches[1] if guilty else None
    watched(parts, 1).fails = lambda method, pieces: (
        method == "denoise" and (len(pieces) == 2 if bad is None else any(piece.caches is bad for piece in pieces))
    )
    texts = engine.finish()
    assert names_of(engine.refusals.items(), grpc.StatusCode.INTERNAL) == ({guilty} if guilty else set())
    assert all("the host's log says why" in refusal.message for refusal in engine.refusals.values())
    assert {name: texts[name] for name in expected if name != guilty} == {
        name: text for name, text in expected.items() if name != guilty
    }


def test_a_step_that_ended_keeps_its_result_when_sweeps_of_its_pass_fail(parts: Parts) -> None:
    engine = Paced(parts)
    engine.begin("step", steps(count=1))
    engine.begin("sweep", sweeps())
    watched(parts, 0).fails = lambda method, pieces: True
    texts = engine.finish()
    assert len(texts["step"]) == 1
    assert set(engine.refusals) == {"sweep"}


@pytest.mark.parametrize("step", ["begin", "next_op", "complete"])
@pytest.mark.parametrize(("error", "code"), [(RuntimeError("boom"), "INTERNAL"), (invalid("no"), "INVALID_ARGUMENT")])
def test_a_hop_that_cannot_start_or_continue_fails_alone(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, code: str
) -> None:
    engine = Paced(parts)
    engine.begin("bad", sweeps(seed=77))
    engine.begin("good", sweeps())
    whole = getattr(SweepWork, step)

    def failing(work: SweepWork, *results: Any) -> Any:
        if work.hop.sweep.sampling.seed == 77:
            raise error
        return whole(work, *results)

    monkeypatch.setattr(SweepWork, step, failing)
    assert len(engine.finish()["good"]) == 16
    assert names_of(engine.refusals.items(), grpc.StatusCode[code]) == {"bad"}


def test_a_released_or_expired_hop_is_not_computed(parts: Parts) -> None:
    engine = Paced(parts)
    for name in ("released", "late", "wanted"):
        job = engine.begin(name, sweeps())
        job.session.released = name == "released"
        job.due_at = 0.0 if name == "late" else job.due_at
    engine.finish()
    assert {name: refusal.code for name, refusal in engine.refusals.items()} == {
        "released": grpc.StatusCode.CANCELLED,
        "late": grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    assert set(watched(parts, 0).counts("denoise")) == {1}
    assert engine.order[:2] == [("released", 1), ("late", 1)], "with the pass that they came in"


@pytest.mark.parametrize("how", ["released", "late"])
def test_a_hop_under_way_ends_at_the_next_pass(parts: Parts, how: str) -> None:
    engine = Paced(parts)
    job = engine.begin("it", sweeps(chunks=(16, 16)))
    engine.begin("other", sweeps(seed=3))

    def meddle(method: str, pieces: Sequence[Any]) -> bool:
        job.session.released = how == "released"
        job.due_at = 0.0 if how == "late" else job.due_at
        return False

    watched(parts, 1).fails = meddle
    assert len(engine.finish()["other"]) == 16
    assert set(engine.refusals) == {"it"}
    assert max(watched(parts, 2).counts("denoise")) == 1, "it went on into the last block"
