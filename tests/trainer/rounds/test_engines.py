"""The engines: the same weights from each, whose work counts, and what they cannot do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from onesweep.stages.errors import ConfigError, ServiceError
from onesweep.trainer.blocks.round_settings import RoundSettings
from onesweep.trainer.rounds.codecs import norm, subtract
from onesweep.trainer.rounds.comparison import ArmResult, engine_named, tally_table
from onesweep.trainer.rounds.processes import SubprocessPool, count_merges
from onesweep.trainer.rounds.settings import SimulatedWorkers, Throttle
from onesweep.trainer.rounds.simulation import WorkerTally
from onesweep.trainer.rounds.spec import RunSpec
from tests.trainer.small import corpus, tiny

# Plain DiLoCo of a small AR model: two workers that are always there, fp32, Nesterov.
plain = replace(
    tiny,
    architecture=replace(tiny.architecture, parts=1, layers=1),
    rounds=RoundSettings(model="ar", rounds=3, steps_per_round=2, deadline="lockstep", codec="fp32", down_codec="fp32"),
)


# The same weights


@pytest.mark.slow
def test_real_processes_make_the_weights_of_one_process() -> None:
    spec = RunSpec.of(plain, corpus)
    expected = engine_named("inprocess").train(spec, corpus, SimulatedWorkers())
    engine = engine_named("grpc")
    engine.check(spec.config, SimulatedWorkers())
    trained = engine.train(spec, corpus, SimulatedWorkers())
    begin = spec.initial()["ar"]
    ours, theirs = trained.weights["ar"], expected.weights["ar"]
    # an exchange adds in another order: that is 1e-8 apart, of which Muon, which computes in bfloat16, may make more
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-3)
    assert norm(subtract(ours, theirs)) < 1e-3 * norm(subtract(theirs, begin))
    assert trained.traffic.updates["in time"] == 6
    assert trained.traffic.up_bytes == expected.traffic.up_bytes
    assert [(tally.made, tally.merged) for tally in trained.tallies] == [(6, 6), (6, 6)]


# What they cannot do


def test_virtual_and_real_workers_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="up_mbps is of virtual workers, real ones have"):
        engine_named("grpc").check(plain, SimulatedWorkers(up_mbps=5.0))
    with pytest.raises(ConfigError, match="pace_s is of real workers"):
        engine_named("inprocess").check(plain, SimulatedWorkers(pace_s=0.1))
    with pytest.raises(ConfigError, match="engine must be one of inprocess, grpc, not 'ray'"):
        engine_named("ray")


# How slow a worker is, and whose work counted


def test_a_pace_makes_steps_as_slow_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    pace = Throttle(SimulatedWorkers(slowness=(1.0, 10.0), pace_s=5.0))
    for replica in (0, 1, 2):
        with pace.step(replica):
            pass
    assert [round(seconds) for seconds in slept] == [5, 50, 5]
    assert pace.steps == 3
    assert SimulatedWorkers(slowness=(3.0,)).rest_s(0, 2.0) == 4.0
    assert SimulatedWorkers().rest_s(0, 2.0) == 0.0


def test_merges_are_read_from_the_log() -> None:
    def accepted(name: str, worker: str, staleness: int = 0, weight: float = 4.0) -> dict[str, Any]:
        return {
            "kind": "accepted", "part": "p", "id": name, "worker": worker, "staleness": staleness, "weight": weight,
        }  # fmt: skip

    records = [
        {"kind": "run"},
        accepted("a", "fast"),
        {"kind": "closed", "part": "p", "updates": ["a"]},
        accepted("b", "slow", staleness=1, weight=2.0),
        accepted("c", "fast"),
        {"kind": "closed", "part": "p", "updates": ["b", "c"]},
        {"kind": "dropped", "part": "p", "id": "d"},
        accepted("e", "slow"),
    ]
    updates, steps = count_merges(records)
    assert updates == {"in time": 3, "late": 1, "dropped": 1}
    assert steps == {"fast": 8.0, "slow": 2.0}


def test_the_table_says_who_worked_and_who_waited() -> None:
    def result(engine: str, tallies: list[WorkerTally]) -> ArmResult:
        return ArmResult(
            arm=f"engine={engine}", seed=0, losses={"next_byte": 2.0}, rounds=1, workers=2, up_bytes=0, down_bytes=0,
            copies_bytes=0, updates={"in time": 2}, busy=1.0, seconds=10.0, tallies=tallies,
        )  # fmt: skip

    rows = tally_table([result("grpc", [WorkerTally(20, 20, 1.0), WorkerTally(2, 0, 12.0)])])
    assert rows[-1] == "| engine=grpc | 2.000 | 10.0 | 20 / 2 | 20 / 0 | 10% / 100% |"
    assert tally_table([result("inprocess", [])]) == []


# Processes


@pytest.mark.parametrize(
    ("job", "sentence"), [(engine_named, "^w: engine must be one of"), (int, "the process of w ended with code 1")]
)
def test_a_process_that_fails_ends_the_run(job: Callable[..., Any], sentence: str) -> None:
    """One that raises an error of ours, and one that raises another: a job is given its way to tell things."""
    with SubprocessPool(1) as crew:
        crew.start("w", job)
        with pytest.raises(ServiceError, match=sentence):
            list(crew.told())
