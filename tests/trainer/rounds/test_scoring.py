"""Scores: who is left out of a merge, who is kept, and what a voter's record does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.small import corpus, tensors, tiny, update
from trainer.blocks.config import RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.codecs import Tensors, add, norm, scale, subtract
from trainer.rounds.ledger import Ledger, Merged
from trainer.rounds.scoring import BATCHES, FULL_RECORD, MOST_STRIKES, HeldOut, Reputation, admit
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
    told = {"replicas": 3, "deadline": "lockstep", "down_codec": "fp32", "robust": "scored", **settings}
    return Ledger(RoundSettings(**told), {"p": tensors(0)}, store or Store(), "run")


def play(ours: Ledger, *lengths: float, rounds: int = 1) -> Merged:
    """Rounds whose workers go so many times the honest way; the last one."""
    for _ in range(rounds):
        for worker, length in enumerate(lengths):
            way = add(
                add(WAY, OWN[2 * worker], 0.2), OWN[2 * worker + 1], -0.2
            )  # better for one batch than for another
            said = ours.accept(update(ours.round("p"), worker, delta=scale(way, length)), 1.0)
            assert said.kind == "accepted", said.reason
        merged = ours.close("p", 1.0, lambda fragment, round_: distance)
    return merged


@pytest.mark.parametrize("lie", [0.0, 0.01, -1.0, -3.0, -9.0])
@pytest.mark.parametrize("honest", [(1.0, 1.0), (1.0,)])
def test_a_liar_is_left_out_and_named(lie: float, honest: Sequence[float]) -> None:
    ours, without = ledger(replicas=len(honest) + 1), ledger(replicas=len(honest))
    merged = play(ours, *honest, lie)
    play(without, *honest)
    liar = f"w{len(honest)}"
    assert merged.left_out == (f"{liar}-0",)
    assert {voter for voter, score in merged.scores.items() if not score.kept} == {liar}
    assert ours.digest("p") == without.digest("p")
    assert ours.store.records()[-1]["scores"][liar]["harmful"] is (lie <= 0)


def test_the_honest_are_kept_and_two_that_lie_alike_are_not() -> None:
    assert play(ledger(), 1.0, 1.0, 1.0).left_out == ()
    assert play(ledger(), 1.0, -2.0, -2.0).updates == ("w0-0",)
    ours = ledger()
    nobody = play(ours, -1.0, -2.0, -3.0)
    assert (nobody.updates, nobody.version) == ((), 1)
    assert ours.digest("p") == digest(tensors(0)), "the round is closed, and nothing moves"


def test_a_merge_that_is_worse_than_its_shares_is_taken_apart() -> None:
    """Each share helps by itself, and two of them go too far."""
    shares = {name: Share(1.0, scale(WAY, length)) for name, length in (("a", 30.0), ("b", 36.0), ("c", 33.0))}

    def step(some: Sequence[Share]) -> Tensors:
        return add(tensors(0), WAY, -30.0 * len(some) ** 2)

    found = admit(tensors(0), shares, step, distance, lambda voter: 1.0)
    assert {voter: score.kept for voter, score in found.items()} == {"a": False, "b": True, "c": False}
    assert not any(score.harmful for score in found.values())


def test_a_record_is_earned_slowly_lost_at_once_and_ends_in_expulsion() -> None:
    good, harmful, idle = ({"kept": i == 0, "harmful": i == 1} for i in range(3))
    ours = Reputation()
    for _ in range(2 * FULL_RECORD):
        ours.take({"old": good})
    assert ours.weight("old") == 1.0
    assert sum(ours.weight(f"new-{i}") for i in range(10)) <= ours.weight("old")
    ours.take({"old": harmful})
    assert ours.weight("old") == 1 / FULL_RECORD
    for _ in range(MOST_STRIKES - 1):
        assert not ours.expelled
        ours.take({"old": harmful, "idle": idle})
    assert ours.expelled == {"old"}


def test_a_restart_knows_every_record_and_makes_the_same_weights(tmp_path: Path) -> None:
    whole, rounds = ledger(), MOST_STRIKES + 2
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
    assert any("decided about w2-4 against its score" in problem for problem in audit(tmp_path).problems)


def test_one_process_leaves_a_liar_out_and_goes_on_without_it() -> None:
    config = replace(tiny, rounds=RoundSettings(rounds=6, steps_per_round=4, replicas=2, robust="scored"))
    config = replace(config, architecture=replace(tiny.architecture, parts=1, layers=1))
    engine = Simulation(RunSpec.of(config, corpus), corpus, SimulatedWorkers(lie=-3.0))
    traffic = engine.run()
    assert engine.ledger.expelled(["block-0"]) == {"block-0-1"}
    assert traffic.updates["left out"] >= MOST_STRIKES
    records = [record for record in engine.ledger.store.records() if record["kind"] == "closed"]
    assert [record["round"] for record in records] == list(range(6))
    assert not any(name.startswith("block-0-1") for record in records for name in record["updates"])


def test_a_stage_is_scored_beside_what_its_workers_began_with() -> None:
    rounds = RoundSettings(model="scorer", replicas=1, deadline="lockstep", robust="scored")
    spec = RunSpec.of(replace(tiny, rounds=rounds), corpus)
    parts = spec.fragments.split(spec.initial())
    ours, (first, second) = Ledger(rounds, parts, Store(), "run"), spec.parts[:2]
    loss = HeldOut(spec, corpus, ours.weights, 0)
    begun = [loss(second, round_)(parts[second]) for round_ in (0, 1)]
    ours.accept(update(fragment=first, delta=scale(parts[first], 0.1)), 1.0)
    ours.close(first, 1.0, lambda fragment, round_: lambda weights: [norm(weights)] * 2)
    now = [loss(second, round_)(parts[second]) for round_ in (0, 1)]
    assert now[0] == begun[0]
    assert now[1] != begun[1]
