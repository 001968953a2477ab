"""Real processes on loopback, under load, with faults: nothing is lost, and no text changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.chaos.page import chaos_page
from loadtest.chaos.record import chaos_record
from loadtest.chaos.run import run_chaos
from loadtest.chaos.settings import ChaosSettings
from loadtest.chaos.stand import open_stand
from loadtest.chaos.table import verdict
from loadtest.load.target import LOOPBACK
from loadtest.machine import this_machine
from loadtest.wan.lab import lab_problem
from serving.cli import main

MODES = ("chunked", "verified", "ar")


@pytest.mark.slow
@pytest.mark.timeout(400)  # nine processes start in it, one after the other on a busy machine
def test_faults_cost_no_text(bundles: Path) -> None:
    kinds = ("flood", "garbage", "kill", "restart", "router")
    settings = ChaosSettings(bundles / "scored", LOOPBACK, 0.5, 2, 1, 120.0, kinds, modes=MODES)
    result = run_chaos(settings, lambda words: None)
    assert sorted(fault.kind for fault in result.happened) == sorted(kinds)
    assert result.trouble == 0, verdict(result)
    assert {result.cases[answer.case].mode for answer in result.answers} == set(MODES)
    assert sum(answer.replays for answer in result.answers) >= 1
    assert any(answer.tries for answer in result.answers), "the router's end cut off calls, which were made again"
    assert any(not answer.first for answer in result.answers), "the flood"
    assert {life.name for life in result.lives} == {"a-1", "a-2", "b-1", "b-2", "router", "clients"}
    record = chaos_record(result, "onesweep chaos", "0", this_machine())
    everything = record["modes"]["all"]
    assert everything["right"] + everything["turned_away"] + everything["late"] == len(record["requests"])
    page = chaos_page(result, "onesweep chaos", "0", this_machine())
    assert "<svg" in page
    assert "garbage" in page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_without_faults_is_a_soak(bundle: Path) -> None:
    settings = ChaosSettings(bundle, LOOPBACK, 0.05, 2, 3, 120.0, (), modes=("sweep", "ar"))
    result = run_chaos(settings, lambda words: None)
    assert (result.trouble, result.happened) == (0, []), verdict(result)
    assert len(result.answers) > 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_link_that_is_cut_in_the_middle_of_a_request_changes_no_text(bundle: Path) -> None:
    if problem := lab_problem():
        pytest.skip(problem)
    asked = """
import sys
from serving.client import Client, Result
with Client(sys.argv[1], insecure=True) as client:
    for piece in client.stream("The sea", mode="chunked", chunk=1, max_bytes=48, seed=1, timeout_s=60.0):
        print(piece.replays if isinstance(piece, Result) else piece.hex(), flush=True)
"""
    with open_stand("links-60", bundle, 8) as stand:
        command = stand.beside([sys.executable, "-P", "-c", asked, stand.router])
        *text, replays = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert replays == "0"
        for attempt in range(6):  # which of two hosts a request goes through is the router's choice
            link = f"router - a-{attempt % 2 + 1}"
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
                assert running.stdout is not None
                first = running.stdout.readline().strip()
                stand.set_cut(link, True)
                *rest, replays = running.stdout.read().split()
            stand.set_cut(link, False)
            assert [first, *rest] == text
            if replays != "0":
                return
        pytest.fail("no request went over a link that was cut")


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
        ("chaos --profile loopback --count 1 --faults kill,freeze,cut", "--count 1 is less than the 2 kinds"),
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
