"""Scores: updates that a merge leaves out or keeps, and the record of a voter."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.small import corpus, tensors, tiny, update
from trainer.blocks.config import RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.codecs import Tensors, add, norm, scale, subtract
from trainer.rounds.ledger import KEPT_VERSIONS, Ledger, Merged
from trainer.rounds.merging import BATCHES, FULL_RECORD, MAX_STRIKES, HeldOut, Loss, Reputation, admit, weighted_mean
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec
from trainer.rounds.store import Share, Store, audit, open_store

WAY = tensors(1, 0.1)
# Batches want different things, and the way is what they have in common.
OWN = [tensors(100 + i, 0.1) for i in range(BATCHES)]
GOALS = [add(tensors(0), add(WAY, own), -40.0) for own in OWN]


def distance(weights: Tensors) -> list[float]:
    return [norm(subtract(weights, goal)) for goal in GOALS]


def ledger(store: Store | None = None, **settings: Any) -> Ledger:
    fields = {"replicas": 3, "deadline_s": 0, "down_codec": "fp32", "robust": "scored", **settings}
    return Ledger(RoundSettings(**fields), {"p": tensors(0)}, store or Store(), "run")


def play(ours: Ledger, *lengths: float, rounds: int = 1) -> Merged:
    """Rounds whose workers go so many times the honest way; the last one."""
    for _ in range(rounds):
        for worker, length in enumerate(lengths):
            # Better for one batch than for another.
            way = add(add(WAY, OWN[2 * worker], 0.2), OWN[2 * worker + 1], -0.2)
            answer = ours.accept(update(ours.round("p"), worker, delta=scale(way, length)), 1.0)
            assert answer.kind == "accepted", answer.reason
        merged = ours.close("p", 1.0, lambda part, round_: distance)
    return merged


@pytest.mark.parametrize("lie", [0.0, 0.01, -1.0, -3.0, -9.0])
@pytest.mark.parametrize("honest", [(1.0, 1.0), (1.0,)])
def test_a_harmful_update_is_left_out_and_its_voter_named(lie: float, honest: Sequence[float]) -> None:
    ours, without = ledger(replicas=len(honest) + 1), ledger(replicas=len(honest))
    merged = play(ours, *honest, lie)
    play(without, *honest)
    liar = f"w{len(honest)}"
    assert merged.left_out == (f"{liar}-0",)
    assert {voter for voter, score in merged.scores.items() if not score.kept} == {liar}
    assert ours.digest("p") == without.digest("p")
    assert ours.store.records()[-1]["scores"][liar]["harmful"] is (lie <= 0)


def test_honest_updates_are_kept_and_two_equal_harmful_ones_are_not() -> None:
    assert play(ledger(), 1.0, 1.0, 1.0).left_out == ()
    assert play(ledger(), 1.0, -2.0, -2.0).updates == ("w0-0",)
    ours = ledger()
    nobody = play(ours, -1.0, -2.0, -3.0)
    assert (nobody.updates, nobody.version) == ((), 1)
    assert ours.digest("p") == digest(tensors(0)), "the round is closed, and nothing moves"


def well(batch: int, x: float, y: float = 0.0) -> float:
    return (x - 1) ** 2 + y**2


@pytest.mark.parametrize(
    ("loss", "ways", "verdicts"),
    [
        (well, [(1.0, 1.2), (1.0, -1.2)], "++"),  # half of each helps, the whole of one harms, the mean is best
        (well, [(0.8,), (0.6,)], "++"),  # the longer step is the better one in a round, and the mean in a run
        (well, [(1.8,), (-0.2,)], "+!"),  # one goes too far, so that one who goes back would help
        # Each helps by itself, and no two together.
        (
            lambda i, x, y, z: 1 - x - y - z + 4 * (x * y + y * z + z * x),
            [(1.0, 0, 0), (0, 1.2, 0), (0, 0, 1.1)],
            "+--",
        ),
        (lambda i, x: x if i % 2 else -0.6 * x, [(1.0,), (1.0,)], "+-"),  # both harm a little in the mean
        (lambda i, x, y: math.nan if y and i == 3 else -x, [(1.0, 0.0), (1.0, 1.0)], "+!"),
    ],
)
def test_updates_are_scored_one_by_one_and_together(
    loss: Callable[..., float], ways: Sequence[Sequence[float]], verdicts: str
) -> None:
    """`+` is kept, `!` harmful. Only the first voter has a record."""
    shares = {str(voter): Share(1.0, {"x": -torch.tensor(way)}) for voter, way in enumerate(ways)}
    found = admit(
        {"x": torch.zeros(len(ways[0]))},
        shares,
        lambda some: scale(weighted_mean(some), -1.0),
        lambda weights: [loss(i, *weights["x"].tolist()) for i in range(BATCHES)],
        lambda voter: float(voter == "0"),
    )
    assert "".join("+" if s.kept else "!" if s.harmful else "-" for s in found.values()) == verdicts


def test_a_record_grows_slowly_falls_at_once_and_ends_in_expulsion() -> None:
    good, harmful, idle = ({"kept": i == 0, "harmful": i == 1} for i in range(3))
    ours = Reputation()
    for _ in range(2 * FULL_RECORD):
        ours.take({"old": good})
    assert ours.weight("old") == 1.0
    assert sum(ours.weight(f"new-{i}") for i in range(10)) <= ours.weight("old")
    ours.take({"old": harmful})
    assert ours.weight("old") == 1 / FULL_RECORD
    for _ in range(MAX_STRIKES - 1):
        assert not ours.expelled
        ours.take({"old": harmful, "idle": idle})
    assert ours.expelled == {"old"}


def test_a_restarted_ledger_has_every_record_and_makes_the_same_weights(tmp_path: Path) -> None:
    whole, rounds = ledger(), MAX_STRIKES + 2
    play(whole, 1.0, 1.0, -3.0, rounds=rounds)
    for _ in range(rounds):
        with open_store(tmp_path) as store:
            ours = ledger(store)
            play(ours, 1.0, 1.0, -3.0)
    assert ours.digest("p") == whole.digest("p")
    with open_store(tmp_path) as store:
        again = ledger(store)
        assert again.expelled(["p"]) == whole.expelled(["p"]) == {"w2"}
        assert again.secret == ours.secret
    found = audit(tmp_path)
    assert (found.problems, found.accepted, found.merged, found.left_out) == ([], 3 * rounds, 2 * rounds, rounds)
    with open_store(tmp_path) as store, store.database as database:
        database.execute("UPDATE merges SET kept = 1 WHERE id = 'w2-4'")
    assert any("contradicts the score of w2-4" in problem for problem in audit(tmp_path).problems)


def test_the_simulation_expels_a_harmful_worker_and_continues() -> None:
    config = replace(tiny, rounds=RoundSettings(rounds=6, steps_per_round=4, replicas=2, robust="scored"))
    config = replace(config, architecture=replace(tiny.architecture, parts=1, layers=1))
    engine = Simulation(RunSpec.of(config, corpus), corpus, SimulatedWorkers(lie=-3.0))
    assert engine.run().updates["left out"] >= MAX_STRIKES
    assert engine.ledger.expelled(["block-0"]) == {"block-0-1"}
    records = [record for record in engine.ledger.store.records() if record["kind"] == "closed"]
    assert [record["round"] for record in records] == list(range(6))
    assert not any(name.startswith("block-0-1") for record in records for name in record["updates"])


def test_a_stage_is_scored_with_the_copies_its_workers_used() -> None:
    # The updates of the stages differ in size: a round of one begins before another's has ended.
    rounds = RoundSettings(model="scorer", rounds=2, steps_per_round=1, deadline_s=0, context_by="copies")
    spec, equal = RunSpec.of(replace(tiny, rounds=replace(rounds, robust="scored")), corpus), Counter[str]()
    engine = Simulation(spec, corpus, SimulatedWorkers(latency_s=1e-6, up_mbps=0.01))

    class Watched(HeldOut):
        def __call__(self, part: str, round_: int) -> Loss:
            loss = super().__call__(part, round_)
            for worker in engine.workers:
                for name, copy in worker.learner.part.copies.items() if worker.part == part else ():
                    held = self.tasks[part].copies[name].state_dict()
                    equal[part] += digest(dict(held)) == digest(dict(copy.state_dict()))
            return loss

    engine.loss = Watched(spec, corpus, engine.ledger.weights, 0)
    engine.run()
    assert equal == dict.fromkeys(spec.parts, rounds.rounds * rounds.replicas)


def test_versions_at_the_start_of_a_round_survive_a_restart() -> None:
    settings, store, begun = RoundSettings(replicas=1), Store(), {"a": tensors(0), "b": tensors(1)}
    ours = Ledger(settings, begun, store, "run")
    ours.begin("b", 1.0)
    ours.accept(update(part="b"), 1.0)
    for number in range(KEPT_VERSIONS):
        for each in (ours, Ledger(settings, begun, store, "run")):
            each.begin("b", 1.0)  # the first one decides
            assert digest(each.weights("a", at_start_of="b")) == digest(begun["a"])
        ours.accept(update(number, part="a"), 1.0)
        ours.close("a", 1.0)
    assert digest(ours.weights("a", at_start_of="b")) != digest(begun["a"]), "that is kept no more"
