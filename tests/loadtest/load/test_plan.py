"""The plan and the recording between the load generator and its parent, and the prompts of users."""

import json
from dataclasses import asdict

import pytest

from loadtest.load.plan import LoadPlan, LoadSample, Recording, Window
from loadtest.workload.caller import Access
from loadtest.workload.prompts import SeededPrompt, seeded_prompts
from stages.errors import InputError


def test_a_plan_and_a_recording_survive_json() -> None:
    plan = LoadPlan(Access("127.0.0.1:1"), "sweep", 8, (SeededPrompt("a", 1), SeededPrompt("b", 2)), 3, 0.5, 2.0, 9.0)
    assert LoadPlan.from_json(json.dumps(asdict(plan))) == plan
    assert plan.patience_s == 14.0
    sample = LoadSample(1, 2.0, 3.0, "UNAVAILABLE", True, 5, "why\nso", "00ff")
    recording = Recording([sample], Window(1.0, 2.0, 0.25))
    assert Recording.from_json(json.dumps(asdict(recording))) == recording


def test_prompts_have_their_own_seeds_and_lengths_that_fit_the_context() -> None:
    cases = seeded_prompts(64, 10, 128, 512)
    assert [case.seed for case in cases] == list(range(10, 74))
    assert len({case.prompt for case in cases}) > 20
    assert len({len(case.prompt) for case in cases}) > 10
    assert max(len(case.prompt.encode()) for case in seeded_prompts(64, 0, 80, 96)) == 16
    with pytest.raises(InputError, match="--bytes must be 1 to 88 to fit the context of 96, not 89"):
        seeded_prompts(64, 0, 89, 96)
