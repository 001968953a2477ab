"""Schedules: the same from the same seed, with every kind, one fault in each turn."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from loadtest.faults.base import QUIET, Fault, make_schedule

BED: Any = None  # a testbed: these kinds do nothing to it


def kind(name: str, weight: int, length_s: tuple[float, float], *targets: str) -> Fault:
    return Fault(name, length_s, lambda *_: lambda: None, lambda testbed: targets, weight)


KINDS = [
    kind("kill", 4, (2.0, 4.0), "a-1", "a-2", "b-1", "b-2"),
    kind("cut", 2, (3.0, 6.0), "router - a-1", "a-1 - b-1"),
    kind("router", 1, (0.5, 1.5), "router"),
]


def test_a_seed_decides_everything() -> None:
    assert make_schedule(KINDS, BED, 600, 24, 7) == make_schedule(KINDS, BED, 600, 24, 7)
    assert make_schedule(KINDS, BED, 600, 24, 7) != make_schedule(KINDS, BED, 600, 24, 8)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_by_its_weight_and_every_target_has_its_turn(seed: int) -> None:
    schedule = make_schedule(KINDS, BED, 600, 14, seed)
    assert Counter(planned.kind for planned in schedule) == {"kill": 8, "cut": 4, "router": 2}
    assert Counter(planned.target for planned in schedule if planned.kind == "kill") == dict.fromkeys(
        KINDS[0].targets(BED), 2
    )


def test_one_fault_a_turn() -> None:
    schedule = make_schedule(KINDS, BED, 600, 20, 1)
    assert all(30 * i <= planned.at_s <= 30 * (i + QUIET) + 0.01 for i, planned in enumerate(schedule))
    assert all(before.at_s + before.length_s < after.at_s for before, after in pairwise(schedule))
    lengths = {kind.name: kind.length_s for kind in KINDS}
    assert all(lengths[p.kind][0] <= p.length_s <= lengths[p.kind][1] for p in schedule)


def test_nothing_is_planned_where_nothing_is_asked_for() -> None:
    assert make_schedule([], BED, 600, 0, 0) == []
