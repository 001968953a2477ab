"""Deadlines, late work, robust merges: closed forms."""

from __future__ import annotations

import pytest
import torch

from trainer.rounds.deadline import new_deadline
from trainer.rounds.late import new_late
from trainer.rounds.merge import of_all, weighted_mean
from trainer.rounds.robust import new_robust
from trainer.rounds.settings import LateName, RoundSettings
from trainer.rounds.tensors import norm
from trainer.rounds.update import Share


def test_lockstep_waits_and_fixed_does_not() -> None:
    assert new_deadline(RoundSettings(deadline="lockstep")).closes_at([1.0], 2, []) is None
    assert new_deadline(RoundSettings(deadline="fixed", deadline_s=9.0)).closes_at([1.0], 2, []) == 9.0


@pytest.mark.parametrize(
    ("arrivals", "past", "closes"),
    [
        ([], [], 100.0),
        ([10.0, 11.0], [], 100.0),  # two of five are no quorum of 0.6
        ([10.0, 11.0, 12.0], [], 22.0),  # twice the median
        ([10.0, 11.0, 30.0], [], 30.0),  # never before the quorum itself
        ([10.0, 11.0, 12.0], [20.0] * 4, 40.0),
        ([10.0, 11.0, 12.0], [90.0] * 4, 100.0),  # never after the limit
    ],
)
def test_adaptive_is_a_quorum_and_a_grace(arrivals: list[float], past: list[float], closes: float) -> None:
    deadline = new_deadline(RoundSettings(quorum=0.6, grace=2.0, deadline_s=100.0))
    assert deadline.closes_at(arrivals, 5, past) == closes


@pytest.mark.parametrize(("name", "worths"), [("drop", [0, 0]), ("stale", [0.5, 0.25]), ("keep", [1, 1])])
def test_late_work_is_worth_what_the_policy_says(name: LateName, worths: list[float]) -> None:
    late = new_late(RoundSettings(late=name))
    assert [late.worth(1), late.worth(2)] == worths


def shares(*values: float) -> list[Share]:
    return [Share(2.0, {"a": torch.tensor([value, -value])}, staleness=i) for i, value in enumerate(values)]


def test_nobody_is_tempered_by_default() -> None:
    found = new_robust(RoundSettings()).temper(shares(1.0, 100.0))
    assert [float(share.delta["a"][0]) for share in found] == [1.0, 100.0]


def test_clip_shortens_what_is_longer_than_the_median_allows() -> None:
    found = new_robust(RoundSettings(replicas=3, robust="clip", clip_factor=2.0)).temper(shares(1.0, 100.0, -1.5))
    assert [float(share.delta["a"][0]) for share in found] == pytest.approx([1.0, 3.0, -1.5])
    assert norm(found[1].delta) == pytest.approx(2 * norm(shares(1.5)[0].delta))
    assert [(share.weight, share.staleness) for share in found] == [(2.0, 0), (2.0, 1), (2.0, 2)]
    zero = new_robust(RoundSettings(replicas=5, robust="clip")).temper(shares(0.0, 0.0))
    assert float(zero[0].delta["a"][0]) == 0.0


def test_trimmed_leaves_out_the_extremes_of_each_coordinate() -> None:
    (found,) = new_robust(RoundSettings(replicas=5, robust="trimmed", trim_share=0.25)).temper(
        shares(1.0, 1000.0, 2.0, -1000.0)
    )
    assert found.delta["a"].tolist() == [1.5, -1.5]
    assert found.weight == 8.0
    trimmed = new_robust(RoundSettings(replicas=5, robust="trimmed"))
    assert len(trimmed.temper(shares(1.0, 2.0))) == 2  # too few to trim
    (median,) = trimmed.temper(shares(1.0, 1000.0, 2.0))  # who is planned need not come
    assert median.delta["a"].tolist() == [2.0, -2.0]


def test_one_sign_flipped_or_scaled_update_moves_a_robust_merge_little() -> None:
    honest = [1.0, 1.1, 0.9, 1.0]
    for attack in (-1.0, 50.0, -50.0):
        (trimmed,) = new_robust(RoundSettings(replicas=5, robust="trimmed")).temper(shares(*honest, attack))
        assert 0.9 <= float(trimmed.delta["a"][0]) <= 1.1
        clipped = new_robust(RoundSettings(replicas=5, robust="clip")).temper(shares(*honest, attack))
        assert max(norm(share.delta) for share in clipped) <= 2.01 * norm(shares(1.0)[0].delta)


def test_what_is_added_adds_up_to_what_it_is_worth_in_time() -> None:
    late = new_late(RoundSettings(late="add"))
    assert late.shares_of_all
    assert not any(new_late(RoundSettings(late=name)).shares_of_all for name in ("drop", "stale", "keep"))
    one, two, three = (weighted_mean(of_all(shares(*values), 2)) for values in ((4.0,), (4.0, 8.0), (4.0, 8.0, 6.0)))
    assert [float(merged["a"][0]) for merged in (one, two, three)] == pytest.approx([2.0, 6.0, 9.0])
    halved = [Share(1.0, {"a": torch.tensor(8.0)}), Share(2.0, {"a": torch.tensor(4.0)})]
    assert float(weighted_mean(of_all(halved, 2))["a"]) == pytest.approx((1 * 8 + 2 * 4) / (2 * 2))
