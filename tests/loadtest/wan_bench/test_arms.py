"""What is named on the command line."""

from __future__ import annotations

import inspect

import pytest

from loadtest.wan_bench import arms
from loadtest.wan_bench.arms import Arm, ModeChoice, parse_choice, parse_choices, parse_names, parse_sizes
from serving.client import request_of
from stages.errors import InputError

MODES = ("sweep", "chunked", "resample", "verified", "ar", "ar-speculative", "local")


@pytest.fixture
def drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that can name a drafter, whether this version's can or not."""
    if "drafter" not in inspect.signature(request_of).parameters:

        def with_drafter(prompt: str, *, drafter: str | None = None) -> None: ...

        monkeypatch.setattr(arms, "request_of", with_drafter)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("ar", ModeChoice("ar")),
        (" ar:int8 ", ModeChoice("ar", "int8")),
        ("sweep:fp32", ModeChoice("sweep", "fp32")),
        ("sweep:int4", ModeChoice("sweep", "int4")),
        ("chunked", ModeChoice("chunked")),
        ("local", ModeChoice("local")),
        ("ar-speculative", ModeChoice("ar-speculative")),
        ("ar-speculative:lookup", ModeChoice("ar-speculative", None, "lookup")),
        ("ar-speculative:lookup+int8", ModeChoice("ar-speculative", "int8", "lookup")),
        ("ar-speculative:int8+model", ModeChoice("ar-speculative", "int8", "model")),
        ("resample:ar", ModeChoice("resample", scorer="ar")),
        ("verified:chain+int8", ModeChoice("verified", "int8", scorer="chain")),
    ],
)
@pytest.mark.usefixtures("drafters")
def test_a_mode_and_its_settings(text: str, choice: ModeChoice) -> None:
    assert parse_choice(text, MODES) == choice
    assert parse_choice(choice.label, MODES) == choice


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--modes is empty"),
        (",", "--modes is empty"),
        ("swep", "unknown mode 'swep' in --modes; choose from sweep, chunked, resample, verified"),
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
            "one drafter (model, lookup, both)",
        ),
        ("resample:lookup", "one codec (fp32, int8), joined by +, one scorer (chain, ar)"),
        ("ar:chain", "'chain' is not a setting"),
        ("local:int8", "'int8' is not a setting; after the colon comes nothing"),
        ("ar,sweep,ar", "--modes names 'ar' twice"),
    ],
)
@pytest.mark.usefixtures("drafters")
def test_what_is_no_mode(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_choices(text, MODES)
    assert says in str(caught.value)


def test_a_drafter_wants_requests_that_can_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "request_of", lambda prompt: None)
    with pytest.raises(InputError, match="cannot name a drafter"):
        parse_choice("ar-speculative:lookup", MODES)
    assert parse_choice("ar-speculative", MODES).drafter is None


def test_settings_that_are_not_named_are_left_to_the_router() -> None:
    assert Arm(ModeChoice("ar"), 8).call("p", 3) == {"prompt": "p", "max_bytes": 8, "seed": 3, "mode": "ar"}
    assert (
        Arm(ModeChoice("ar", "int8", "lookup"), 8).call("p", 3).items()
        >= {"codec": "int8", "drafter": "lookup"}.items()
    )


def test_lists() -> None:
    assert parse_sizes("32,256") == (32, 256)
    assert parse_names(" lan, wan-50 ") == ("lan", "wan-50")
    for parse, text in (
        (parse_sizes, "a"),
        (parse_sizes, ""),
        (parse_sizes, "8,8"),
        (parse_names, ","),
        (parse_names, "a,a"),
    ):
        with pytest.raises(InputError):
            parse(text)
