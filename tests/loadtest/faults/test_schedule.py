"""Schedules: the same from the same seed, with every kind, one fault in each turn."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from loadtest.benches import ChaosSettings
from loadtest.faults.serving_testbed import FAULTS, QUIET, make_schedule
from loadtest.lab.lab import lab_problem
from serving.cli.__main__ import main

TARGETS = {"kill": ["a-1", "a-2", "b-1"], "cut": ["router - a-1", "a-1 - b-1"], "router": ["router"]}
SETTINGS = ChaosSettings(minutes=10, seed=7)


def test_a_seed_decides_everything() -> None:
    assert make_schedule(TARGETS, SETTINGS) == make_schedule(TARGETS, SETTINGS)
    assert make_schedule(TARGETS, SETTINGS) != make_schedule(TARGETS, replace(SETTINGS, seed=8))


def test_one_fault_a_turn_of_every_kind() -> None:
    schedule, turn_s = make_schedule(TARGETS, SETTINGS), (600 - SETTINGS.warm_up_s) / 24
    assert Counter(planned.kind for planned in schedule) == {"kill": 8, "cut": 8, "router": 8}
    assert all(turn_s * i <= planned.at_s <= turn_s * (i + QUIET) + 0.01 for i, planned in enumerate(schedule))
    assert all(before.at_s + before.length_s < after.at_s for before, after in pairwise(schedule))
    assert all(FAULTS[p.kind].length_s[0] <= p.length_s <= FAULTS[p.kind].length_s[1] for p in schedule)
    assert len(make_schedule(TARGETS, replace(SETTINGS, minutes=0.1))) == 3


# Flags of fault runs that cannot be: refused in a sentence, before anything is started.
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench chaos --checkpoint /nowhere", "/nowhere"),
        ("bench chaos --simulate --minutes 10", "--simulate accepts only --seed and --schedules"),
        ("bench chaos --schedules 1000", "--schedules needs --simulate"),
        ("bench chaos --profile moon", "no profile 'moon'; available: loopback, "),
        ("bench chaos --profile loopback --json /nowhere/x.json", "cannot write /nowhere/x.json"),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "moon" in arguments and "profile" in arguments and lab_problem():
        pytest.skip(lab_problem())
    assert main(arguments.split()) in (1, 2)
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
