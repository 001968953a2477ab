"""Schedules: the same from the same seed, with every kind, one fault in each turn."""

from collections import Counter
from itertools import pairwise
from typing import Any

from loadtest.faults.base import QUIET, Fault, make_schedule

BED: Any = None  # a testbed: these kinds do nothing to it


def kind(name: str, length_s: tuple[float, float], *targets: str) -> Fault:
    return Fault(name, length_s, lambda *_: lambda: None, lambda testbed: targets)


KINDS = [
    kind("kill", (2.0, 4.0), "a-1", "a-2", "b-1", "b-2"),
    kind("cut", (3.0, 6.0), "router - a-1", "a-1 - b-1"),
    kind("router", (0.5, 1.5), "router"),
]


def test_a_seed_decides_everything() -> None:
    assert make_schedule(KINDS, BED, 600, 24, 7) == make_schedule(KINDS, BED, 600, 24, 7)
    assert make_schedule(KINDS, BED, 600, 24, 7) != make_schedule(KINDS, BED, 600, 24, 8)


def test_all_kinds_come_equally_often() -> None:
    drawn = Counter(planned.kind for planned in make_schedule(KINDS, BED, 600, 14, 1))
    assert drawn == {"kill": 5, "cut": 5, "router": 4}


def test_one_fault_a_turn() -> None:
    schedule = make_schedule(KINDS, BED, 600, 20, 1)
    assert all(30 * i <= planned.at_s <= 30 * (i + QUIET) + 0.01 for i, planned in enumerate(schedule))
    assert all(before.at_s + before.length_s < after.at_s for before, after in pairwise(schedule))
    lengths = {kind.name: kind.length_s for kind in KINDS}
    assert all(lengths[p.kind][0] <= p.length_s <= lengths[p.kind][1] for p in schedule)


def test_nothing_is_planned_where_nothing_is_asked_for() -> None:
    assert make_schedule([], BED, 600, 0, 0) == []
