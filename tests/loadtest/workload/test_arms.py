"""What is named on the command line."""

import pytest

from onesweep.loadtest.workload.arms import (
    TOKENS,
    Arm,
    Length,
    ModeChoice,
    parse_choice,
    parse_choices,
    parse_lengths,
    parse_names,
)
from onesweep.loadtest.workload.prompts import COPYING, NOVEL
from onesweep.stages.errors import InputError


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("ar", ModeChoice("ar")),
        (" ar:int8 ", ModeChoice("ar", "int8")),
        ("sweep:fp32", ModeChoice("sweep", "fp32")),
        ("sweep:int4", ModeChoice("sweep", "int4")),
        ("chunked", ModeChoice("chunked")),
        ("chunked:4", ModeChoice("chunked", chunk=4)),
        ("chunked:fp32+16", ModeChoice("chunked", "fp32", chunk=16)),
        ("resample:12+model", ModeChoice("resample", None, "model", chunk=12)),
        ("resample:12x64+int8", ModeChoice("resample", "int8", chunk=12, candidates=64)),
        ("resample:x8", ModeChoice("resample", candidates=8)),
        ("local", ModeChoice("local")),
        ("ar-speculative", ModeChoice("ar-speculative")),
        ("ar-speculative:lookup", ModeChoice("ar-speculative", None, "lookup")),
        ("ar-speculative:lookup+int8", ModeChoice("ar-speculative", "int8", "lookup")),
        ("ar-speculative:int8+model", ModeChoice("ar-speculative", "int8", "model")),
        ("resample:ar", ModeChoice("resample", scorer="ar")),
        ("resample:scorer+int8", ModeChoice("resample", "int8", scorer="scorer")),
        ("resample:model", ModeChoice("resample", None, "model")),
    ],
)
def test_a_mode_and_its_settings(text: str, choice: ModeChoice) -> None:
    assert parse_choice(text) == choice
    assert parse_choice(choice.label) == choice


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--modes is empty"),
        (",", "--modes is empty"),
        ("swep", "unknown mode 'swep' in --modes (did you mean sweep or steps?); choose from sweep, chunked, resample"),
        ("Sweep", "unknown mode 'Sweep'"),
        (":int8", "unknown mode ''"),
        ("ar:", "'' is not a setting"),
        ("ar:int8+", "'' is not a setting"),
        ("sweep:int8+fp32", "'fp32' is not a setting; after the colon comes one codec (fp32, int8, int4)"),
        ("ar:int4", "'int4' is not a setting; after the colon comes one codec (fp32, int8)"),
        ("ar:lookup", "'lookup' is not a setting; after the colon comes one codec (fp32, int8)"),
        (
            "ar-speculative:lookup+model",
            "'model' is not a setting; after the colon comes one codec (fp32, int8), joined by +, "
            "one drafter (hosts, model, lookup, both)",
        ),
        (
            "resample:lookup",
            "one codec (fp32, int8), joined by +, one drafter (model), joined by +, one scorer (scorer, ar)",
        ),
        ("ar:chain", "'chain' is not a setting"),
        ("ar:4", "'4' is not a setting"),
        (
            "chunked:0",
            "'0' is not a setting; after the colon comes one codec (fp32, int8, int4), joined by +, how much",
        ),
        ("chunked:4+8", "'8' is not a setting"),
        ("chunked:4x8", "'4x8' is not a setting; after the colon comes one codec"),
        ("resample:x0", "'x0' is not a setting"),
        ("resample:12x64x2", "'12x64x2' is not a setting"),
        ("resample:12x9999999", "how much a sweep writes (1 or more), or that and of how many candidates (CxM, xM)"),
        ("local:int8", "'int8' is not a setting; after the colon comes nothing"),
        ("ar,sweep,ar", "--modes names 'ar' twice"),
    ],
)
def test_what_is_no_mode(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_choices(text)
    assert says in str(caught.value)


def test_settings_that_are_not_named_are_left_to_the_router() -> None:
    call = Arm(ModeChoice("ar"), Length(8)).call(0, 3)
    assert call == {"prompt": NOVEL.texts[0], "max_bytes": 8, "seed": 3, "mode": "ar"}
    call = Arm(ModeChoice("ar", "int8", "lookup"), Length(8, TOKENS), 0.0, COPYING, 0.5).call(1, 3)
    assert call["prompt"] == COPYING.texts[1]
    assert call.items() >= {"codec": "int8", "drafter": "lookup", "max_tokens": 8, "temperature": 0.5}.items()
    assert "max_bytes" not in call


def test_lists() -> None:
    assert parse_lengths("32,256") == (Length(32), Length(256))
    assert parse_lengths("128", TOKENS) == (Length(128, TOKENS),)
    assert parse_names(" lan, wan-50 ") == ("lan", "wan-50")
    for parse, text in (
        (parse_lengths, "a"),
        (parse_lengths, ""),
        (parse_lengths, "8,8"),
        (parse_names, ","),
        (parse_names, "a,a"),
    ):
        with pytest.raises(InputError):
            parse(text)
