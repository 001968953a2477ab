"""The grammar of mode specs."""

import pytest

from onesweep.loadtest.quality.commands import parse_temperatures
from onesweep.loadtest.quality.generation import QualityArm, at_temperatures, parse_arm, parse_arms
from onesweep.stages.errors import InputError

MODES = ("sweep", "chunked", "ar", "resample")


@pytest.mark.parametrize(
    ("spec", "arm"),
    [
        ("sweep", QualityArm("sweep")),
        ("sweep:steps=16", QualityArm("sweep", steps=16)),
        ("resample:ar", QualityArm("resample", "ar")),
        ("resample:scorer:chunk=32:candidates=64", QualityArm("resample", "scorer", chunk=32, candidates=64)),
        ("ar:temperature=1", QualityArm("ar", temperature=1.0)),
        ("ar:temperature=0", QualityArm("ar", temperature=0.0)),
    ],
)
def test_a_spec_names_an_arm_and_the_arm_its_spec(spec: str, arm: QualityArm) -> None:
    assert parse_arm(spec, MODES) == arm
    assert parse_arm(arm.label, MODES) == arm


def test_a_request_has_what_was_named_and_nothing_else() -> None:
    request = parse_arm("resample:ar:chunk=8:temperature=0", MODES).request()
    assert request == {"mode": "resample", "scorer": "ar", "chunk": 8, "temperature": 0.0}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("swep", "unknown mode 'swep' in 'swep' .did you mean sweep... choose from sweep, chunked, ar, resample"),
        ("ar:deep", "'deep' is not a setting; after the mode comes a scorer .scorer, ar., then KEY=VALUE"),
        ("resample:chunk=8:ar", "'ar' is not a setting"),
        ("sweep:size=3", "unknown key 'size'; choose from chunk, candidates, steps, temperature"),
        ("sweep:steps=few", "steps must be a whole number, not 'few'"),
        ("ar:temperature=nan", "temperature must be a number, not 'nan'"),
        ("sweep:steps=1:steps=2", "names steps twice"),
        ("chunked:chunk=0", "chunk must be a whole number from 1"),
    ],
)
def test_mistakes_end_in_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_arm(spec, MODES)


def test_lists_of_arms() -> None:
    assert [arm.label for arm in parse_arms("sweep, ar:temperature=1", MODES)] == ["sweep", "ar:temperature=1.0"]
    with pytest.raises(InputError, match="--modes is empty"):
        parse_arms(" ,", MODES)
    with pytest.raises(InputError, match=r"'ar:temperature=1\.0' is named twice"):
        parse_arms("ar:temperature=1,ar:temperature=1.0", MODES)


def test_each_arm_at_each_temperature_but_where_it_names_its_own() -> None:
    arms = at_temperatures(parse_arms("sweep,ar:temperature=1", MODES), parse_temperatures("0.7,0.9,0.7"))
    assert [arm.label for arm in arms] == ["sweep:temperature=0.7", "sweep:temperature=0.9", "ar:temperature=1.0"]
    with pytest.raises(InputError, match="--temperatures 'hot' must be numbers"):
        parse_temperatures("hot")
