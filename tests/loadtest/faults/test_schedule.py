"""Schedules: the same from the same seed, with every kind, one fault in each turn."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from loadtest.benches import ChaosSettings
from loadtest.faults.serving_testbed import FAULTS, QUIET, make_schedule

TARGETS = {"kill": ["a-1", "a-2", "b-1"], "cut": ["router - a-1", "a-1 - b-1"], "router": ["router"]}
SETTINGS = ChaosSettings(minutes=10, seed=7)


def test_a_seed_decides_one_fault_a_turn_of_every_kind() -> None:
    schedule, turn_s = make_schedule(TARGETS, SETTINGS), (600 - SETTINGS.warm_up_s) / 24
    assert schedule == make_schedule(TARGETS, SETTINGS) != make_schedule(TARGETS, replace(SETTINGS, seed=8))
    assert Counter(planned.kind for planned in schedule) == {"kill": 8, "cut": 8, "router": 8}
    assert all(turn_s * i <= planned.at_s <= turn_s * (i + QUIET) + 0.01 for i, planned in enumerate(schedule))
    assert all(before.at_s + before.length_s < after.at_s for before, after in pairwise(schedule))
    assert all(FAULTS[p.kind].length_s[0] <= p.length_s <= FAULTS[p.kind].length_s[1] for p in schedule)
    assert len(make_schedule(TARGETS, replace(SETTINGS, minutes=0.1))) == 3
