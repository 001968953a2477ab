"""The command `plan`: its rows, and what it refuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.commands import count

LINK = ("--link", "20,100,30")
NAMES = ["as set", "every step", "whole blocks", "diloco", "eager", "eager e3m0"]

Run = Callable[..., Any]


@pytest.fixture
def plan(onesweep: Run, settings: Callable[..., Path]) -> Run:
    """The rows of a plan for the tiny settings, by name."""

    def run(*arguments: str, more: str = "") -> dict[str, Any]:
        config = settings()
        config.write_text(config.read_text() + more)
        found = onesweep("train", "plan", "--config", config, *arguments, "--json")
        assert found.code == 0, found.message
        return {row["name"]: row for row in json.loads(found.out)["rows"]}

    return run


def test_every_way_is_a_row(plan: Run) -> None:
    rows = plan(*LINK, "--step-s", "0.5", more="[rounds]\nrounds = 2\n")
    assert list(rows) == NAMES
    assert {name: row["rounds"] for name, row in rows.items() if row["rounds"] != 2} == {"every step": 60}
    assert rows["every step"]["up_bytes"] == 30 * rows["diloco"]["up_bytes"]
    assert 7 < rows["diloco"]["up_bytes"] / rows["eager e3m0"]["up_bytes"] < 32 / 4.25
    assert rows["every step"]["used"] < rows["diloco"]["used"] < rows["eager e3m0"]["used"]


def test_a_step_is_measured(plan: Run) -> None:
    rows = plan(*LINK, "--threads", "1")
    assert rows["diloco"]["seconds"] > 0


def test_the_table_has_the_model_and_a_line_for_each(onesweep: Run) -> None:
    found = onesweep("train", "plan", "--params", "2M", *LINK, "--step-s", "1")
    assert found.code == 0, found.message
    first, _, header, _, *rows = found.out.splitlines()
    assert "3 parts with 2 workers each: 3 x 2 layers" in first
    assert header.startswith("| way | rounds | up | down | all | hours | used |")
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in NAMES]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("--step-s", "0"), "--step-s must be above 0"),
        (("--step-s", "1", "--params", "0"), "--params must be above 0"),
        (("--step-s", "1", "--link", "moon"), "no link 'moon'; there are lan, links-20"),
        (("--step-s", "1", "--link", "20,100"), "no link '20,100'.* Mbit/s up and down and milliseconds one way"),
        (("--step-s", "1", "--link", "0,100,30"), "up_mbps must be a finite number above 0"),
    ],
)
def test_what_cannot_be_planned_is_told(
    onesweep: Run, settings: Callable[..., Path], changes: tuple[str, ...], words: str
) -> None:
    found = onesweep("train", "plan", "--config", settings(), *LINK, *changes)
    assert found.code == 2
    assert re.search(words, found.message)


@pytest.mark.parametrize(("text", "number"), [("350M", 350e6), ("1.5B", 1.5e9), ("1e9", 1e9), ("12K", 12e3)])
def test_large_numbers_may_be_short(text: str, number: float) -> None:
    assert count(text) == number
