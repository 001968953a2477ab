"""The ledger: what counts, what is refused with which sentence, when a round is due, what a merge makes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.small import tensors, update
from trainer.blocks.config import RoundSettings
from trainer.rounds.codecs import norm, scale, subtract
from trainer.rounds.ledger import HISTORY_SIZE, Ledger
from trainer.rounds.store import Store


def ledger(**settings: Any) -> Ledger:
    return Ledger(
        RoundSettings(**{"deadline_s": 0, "codec": "fp32", "down_codec": "fp32", **settings}),
        {"p": tensors(0)},
        Store(),
        "run",
    )


def test_closing_a_round_merges_its_updates_and_opens_the_next() -> None:
    ours = ledger()
    assert ours.accept(update(0, 0, steps=3), 1.0).kind == "accepted"
    assert not ours.due("p", 1e9)
    assert ours.accept(update(0, 1, steps=1), 2.0).kind == "accepted"
    assert ours.due("p", 2.0)
    merged = ours.close("p", 2.0)
    assert (merged.version, merged.updates, ours.round("p")) == (1, ("w0-0", "w1-0"), 1)
    for name, tensor in tensors(0).items():
        expected = tensor - (0.75 * update(0, 0).delta[name] + 0.25 * update(0, 1).delta[name])
        torch.testing.assert_close(ours.weights("p")[name], expected)


def test_the_same_update_counts_once() -> None:
    ours = ledger()
    assert ours.accept(update(), 1.0).kind == "accepted"
    assert ours.accept(update(), 1.0).kind == "duplicate"
    replayed = ours.accept(replace(update(), id="again"), 1.0)
    assert (replayed.kind, replayed.reason) == ("refused", "w0 has already submitted w0-0 for round 0 of p")
    taken = ours.accept(replace(update(0, 1), id="w0-0"), 1.0)
    assert "another worker has already submitted w0-0" in taken.reason
    ours.accept(update(0, 1), 1.0)
    ours.close("p", 1.0)
    assert ours.accept(update(), 1.0).kind == "duplicate"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 1}, "round 1 of p is not open; the open round is 0"),
        ({"round": -1}, "round -1 of p is not open"),
        ({"base_version": 1}, "must start from a version up to 0, not 1"),
        ({"delta": {"bias": torch.tensor([float("nan")])}}, "the update has non-finite numbers"),
    ],
)
def test_a_wrong_update_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    ours = ledger()
    verdict = ours.accept(replace(update(), **changes), 1.0)
    assert verdict.kind == "refused"
    assert reason in verdict.reason
    assert len(ours.store.records()) == 1


def test_the_norm_of_an_update_is_bounded() -> None:
    begun = norm(tensors(0))

    def sent(ours: Ledger, number: int, worker: int, length: float) -> str:
        delta = tensors(1)
        return ours.accept(update(number, worker, delta=scale(delta, length / norm(delta))), 1.0).kind

    assert [sent(ledger(), 0, 0, begun * factor) for factor in (9.9, 10.1)] == ["accepted", "refused"]
    assert sent(ledger(steps_per_round=300), 0, 0, 29.0 * begun) == "accepted", "long rounds go further"
    ours, length = ledger(), 1.0
    for number in range(HISTORY_SIZE):  # one of two, who is longer from round to round
        assert sent(ours, number, 0, 1.0) == "accepted"
        if sent(ours, number, 1, length) == "accepted":
            length *= 5
        ours.close("p", 1.0)
    assert length <= 50.0 * begun


def test_workers_beyond_the_replicas_of_a_part_are_refused() -> None:
    for kept in (0.0, 0.5):
        ours = ledger(stale_discount=kept)
        found = [ours.accept(update(0, worker), 1.0) for worker in range(4)]
        assert [verdict.kind for verdict in found] == ["accepted"] * 2 + ["refused"] * 2
        assert found[2].reason.startswith("round 0 of p already has updates from its 2 workers")
        ours.close("p", 1.0)
        assert ours.accept(update(0, 5), 2.0).kind == "refused"
        assert len(ours.store.records()) == 4


def late_ledger(kept: float, closed: int = 1) -> Ledger:
    ours = ledger(stale_discount=kept, quorum=1.0, deadline_s=5.0)
    for number in range(closed):
        ours.accept(update(number, 0), 10.0 * number + 1)
        ours.close("p", 10.0 * number + 5)
    return ours


def test_late_updates_are_dropped_discounted_or_kept() -> None:
    dropped = late_ledger(0.0)
    verdict = dropped.accept(update(0, 1), 6.0)
    assert (verdict.kind, verdict.reason) == ("dropped", "round 0 of p is closed; late updates are dropped")
    assert dropped.accept(update(0, 1), 7.0).kind == "duplicate"
    assert dropped.due_at("p") is None
    for kept, weight in ((0.5, 0.25), (1.0, 1.0)):
        ours = late_ledger(kept, closed=2)
        before = ours.weights("p")
        assert ours.accept(update(0, 1), 16.0).kind == "accepted"
        assert ours.accept(update(2, 0), 16.0).kind == "accepted"
        ours.close("p", 20.0)
        for name in before:
            mean = (update(2, 0).delta[name] + weight * update(0, 1).delta[name]) / (1 + weight)
            torch.testing.assert_close(ours.weights("p")[name], before[name] - mean)


def test_late_updates_of_one_voter_are_one_vote() -> None:
    """Two rounds' updates are kept until a third, under three names of one voter: three of five values."""
    ours = ledger(replicas=3, stale_discount=1.0, quorum=1.0, deadline_s=9.0, steps_per_round=4)
    honest = tensors(1, 0.1)
    for number in range(2):
        for worker in (1, 2):
            ours.accept(update(number, worker, delta=honest), 1.0)
        ours.close("p", 9.0)
    before = ours.weights("p")
    for number in range(3):
        eve = update(number, 7 + number, delta=scale(honest, -9.0), voter="eve")
        assert ours.accept(eve, 9.0).kind == "accepted"
    for worker in (1, 2):
        ours.accept(update(2, worker, delta=honest), 9.0)
    ours.close("p", 20.0)
    third = {name: (honest[name] + honest[name] - 9.0 * honest[name]) / 3 for name in before}
    torch.testing.assert_close(ours.weights("p"), subtract(before, third))


def test_a_round_with_an_update_is_due_after_its_deadline() -> None:
    ours = ledger(quorum=1.0, deadline_s=5.0)
    assert not ours.due("p", 100.0)
    ours.accept(update(), 2.0)
    assert ours.due_at("p") == 5.0
    assert [ours.due("p", now) for now in (4.9, 5.0)] == [False, True]
    ours.close("p", 5.0)
    ours.accept(update(1), 7.0)
    assert ours.due_at("p") == 10.0
    ours.expect("p", 1)  # the other left
    assert ours.due("p", 7.0)
