"""Real processes on loopback, under load, with faults: nothing is lost, and no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.chaos.page import chaos_page
from loadtest.chaos.record import chaos_record
from loadtest.chaos.run import run_chaos
from loadtest.chaos.settings import ChaosSettings
from loadtest.load.target import LOOPBACK
from loadtest.machine import this_machine
from serving.cli import main

MODES = ("sweep", "chunked", "resample", "verified", "infill", "ar", "ar-speculative", "local")


@pytest.mark.slow
@pytest.mark.timeout(400)  # nine processes start in it, one after the other on a busy machine
def test_a_kill_a_freeze_garbage_and_a_new_router_cost_no_text(bundles: Path) -> None:
    settings = ChaosSettings(
        bundles / "scored", LOOPBACK, 0.3, 3, 1, 120.0, ("kill", "freeze", "garbage", "router"), modes=MODES
    )
    said: list[str] = []
    result = run_chaos(settings, said.append)
    assert sorted(fault.kind for fault in result.happened) == ["freeze", "garbage", "kill", "router"]
    assert result.trouble == 0, said
    assert {result.cases[answer.case].mode for answer in result.answers} == set(MODES)
    assert sum(answer.replays for answer in result.answers) >= 1
    assert any(answer.tries for answer in result.answers), "the router's end cut off calls, which were made again"
    assert {life.name for life in result.lives} == {"a-1", "a-2", "b-1", "b-2", "router", "clients"}
    record = chaos_record(result, "onesweep chaos", "0", this_machine())
    assert record["modes"]["all"]["right"] == len(record["requests"])
    page = chaos_page(result, "onesweep chaos", "0", this_machine())
    assert "<svg" in page
    assert "garbage" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("chaos --minutes 0", "--minutes must be above 0"),
        ("chaos --minutes nan", "--minutes must be above 0"),
        ("chaos --requests-at-once 0", "--requests-at-once must be above 0"),
        ("chaos --seed -1", "--seed must be from 0"),
        ("chaos --faults flood,quake", "--faults has no 'quake'; choose from kill, "),
        ("chaos --faults kill,kill", "--faults names something twice"),
        ("chaos --faults kill,", "--faults 'kill,' must be names"),
        ("chaos --count 1 --faults kill,freeze", "--count 1 is less than the 2 kinds"),
        ("chaos --faults cut --profile loopback", "loopback has no link to cut"),
        ("chaos --audit 2", "--audit must be from 0 to 1"),
        ("chaos --audit 0.1 --faults garbage", "--audit leaves it out"),
        ("chaos --modes poem", "--modes has no 'poem'"),
        ("chaos --profile moon", "no profile 'moon'"),
        ("chaos --profile loopback --html /nowhere/x.html", "cannot write /nowhere/x.html"),
        ("soak --patience-s 0", "--patience-s must be above 0"),
        ("soak --checkpoint /nowhere", "/nowhere"),
        ("flood --at 1", "--at must be above 1"),
        ("flood --knee 0", "--knee must be 1 to"),
        ("flood --polite -1", "--polite must be 0 to"),
        ("flood --mode poem", "unknown mode 'poem'"),
        ("flood --router nowhere", "router"),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) in (1, 2)
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
