"""A run of `bench chaos`: its report, and real processes that lose nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.benches import ChaosSettings
from loadtest.faults.serving_run import (
    LATE,
    Answer,
    ChaosResult,
    chaos,
    serving_report,
    verdict,
    wrong_answers,
)
from loadtest.lab.lab import lab_problem
from loadtest.load.plan import OK, Outcome
from loadtest.simulation.schedule import PlannedFault
from loadtest.workload.caller import RouterState
from loadtest.workload.prompts import SeededRequest
from loadtest.workload.testbed import LOOPBACK

TEXT = b"calm sea"
GOOD = Answer(0, 10.0, 12.0, OK, [TEXT])
RETRIABLE = replace(GOOD, outputs=[TEXT[:4], TEXT], failures=["UNAVAILABLE: gone"])
KILL = PlannedFault("kill", ("a-1",), 10.6, 3.4)
RESULT = ChaosResult(
    settings=ChaosSettings(profile=LOOPBACK, minutes=1.0),
    cases=(SeededRequest("The", 3, "ar", 48),),
    texts=[TEXT],
    answers=[GOOD, RETRIABLE],
    faults=[KILL],
    last_state=RouterState(20.0, {}),
    seconds=15.0,
    ended={},
)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (GOOD, Outcome.RIGHT),
        (RETRIABLE, Outcome.RIGHT),
        (replace(GOOD, outputs=[b"calm see"]), Outcome.WRONG),
        (replace(GOOD, outputs=[TEXT[:-1]]), Outcome.WRONG),
        (replace(RETRIABLE, outputs=[b"cold", TEXT]), Outcome.WRONG),
        (replace(GOOD, status=LATE, outputs=[TEXT[:3]]), Outcome.LOST),
        (replace(GOOD, status="INTERNAL", outputs=[b""]), Outcome.LOST),
    ],
)
def test_an_answer_is_right_wrong_or_lost(answer: Answer, outcome: Outcome) -> None:
    result = replace(RESULT, answers=[answer])
    assert answer.outcome(TEXT) is outcome
    assert bool(wrong_answers(result)) is bool(result.trouble) is (outcome is not Outcome.RIGHT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"last_state": RouterState(20.0, {"a-1": "lost"})}, "not ready at the end: a-1: lost"),
        ({"last_state": RouterState(20.0, {}, sessions=2)}, "2 sessions are still open on hosts after the last answer"),
        ({"ended": {"a-2": "out of memory"}}, "a-2 exited: out of memory"),
    ],
)
def test_sessions_problems_and_dead_processes_at_the_end_fail_the_run(changes: dict[str, object], words: str) -> None:
    result = replace(RESULT, **changes)  # type: ignore[arg-type]
    assert words in verdict(result)
    assert not serving_report(result).passed


def test_a_run_without_trouble_passes() -> None:
    report = serving_report(RESULT)
    assert report.passed
    assert "2 right, 0 wrong, 0 lost; 0 replays" in report.table
    assert report.record["requests"] == {"requests": 2, "right": 2, "wrong": 0, "lost": 0}


@pytest.mark.slow
@pytest.mark.timeout(900)  # nine processes start in it, one after the other on a busy machine
def test_faults_cost_no_text(bundles: Path) -> None:
    """Two routers, all kinds of faults. Links are cut where a lab can be made."""
    has_links = not lab_problem()
    kinds = ("freeze", "frozen-router", "kill", "router", *(("cut",) if has_links else ()))
    settings = ChaosSettings(
        checkpoint=bundles / "scored",
        profile="links-20" if has_links else LOOPBACK,
        minutes=0.1,
        length_scale=0.25,
        warm_up_s=1.0,
        requests_at_once=2,
        seed=1,
        patience_s=120.0,
    )
    result = chaos(settings)
    assert sorted(fault.kind for fault in result.faults) == sorted(kinds)
    assert result.trouble == 0, verdict(result)
    assert sum(answer.replays for answer in result.answers) >= 1
