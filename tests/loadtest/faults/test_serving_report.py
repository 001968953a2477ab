"""What a run says in words: rows under their heads, and every kind of trouble."""

from dataclasses import replace

import pytest

from loadtest.faults.base import FaultRecord
from loadtest.faults.clients import OK, Answer, SeededRequest, Try
from loadtest.faults.serving_run import (
    FAULT_HEAD,
    MODE_HEAD,
    USAGE_HEAD,
    ChaosResult,
    fault_rows,
    mode_rows,
    serving_report,
    usage_rows,
    verdict,
)
from loadtest.faults.settings import ChaosSettings
from loadtest.workload.caller import RouterState
from loadtest.workload.testbed import LOOPBACK

GOOD = Answer(0, 10.0, 12.0, OK, b"a", [11.0])
AGAIN = replace(GOOD, tries=[Try("RESOURCE_EXHAUSTED", "full", 500), Try("UNAVAILABLE", "lost")])
RESULT = ChaosResult(
    settings=ChaosSettings(profile=LOOPBACK, minutes=1.0, requests_at_once=2, faults=()),
    cases=(SeededRequest("ar", "The", 3),),
    texts=[b"a"],
    answers=[GOOD, AGAIN],
    faults=[FaultRecord("kill", "a-1", 10.5, 11.5)],
    health=[RouterState(20.0, {})],
    usages=({"a-1": (160.0, 9)}, {"a-1": (219.0, 9)}),
    begin_s=5.0,
    end_s=20.0,
    left_out=(),
    ended={},
)


def test_rows_are_as_long_as_their_heads() -> None:
    for head, rows_of in ((MODE_HEAD, mode_rows), (FAULT_HEAD, fault_rows), (USAGE_HEAD, usage_rows)):
        rows = rows_of(RESULT)
        assert rows
        assert {len(row) for row in rows} == {len(head)}
    (modes, total) = (dict(zip(MODE_HEAD, row, strict=True)) for row in mode_rows(RESULT))
    assert (modes["right"], total["refused"], total["called again"]) == ("2", "1", "1")
    assert modes["p50 s"] == "2.00"


def test_a_sound_run_has_no_trouble() -> None:
    assert RESULT.trouble == 0
    assert "2 right, 0 wrong, 0 lost; 0 replays" in verdict(RESULT)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"health": [RouterState(20.0, {"a-1": "lost", "b-1": "no link"})]}, "not usable at the end: a-1: lost"),
        ({"health": [RouterState(20.0, {}, sessions=2)]}, "2 sessions are still open on hosts after the last answer"),
        ({"ended": {"a-2": "out of memory"}}, "a-2 had ended: out of memory"),
    ],
)
def test_what_is_left_behind_is_named(changes: dict[str, object], words: str) -> None:
    result = replace(RESULT, **changes)  # type: ignore[arg-type]
    assert result.trouble > 0
    assert words in verdict(result)


def test_the_report_fails_where_there_is_trouble() -> None:
    report = serving_report(RESULT)
    assert report.holds
    assert "What faults cost" in report.table
    assert report.record["processes"]["after"]["a-1"] == (219.0, 9)
    assert not serving_report(replace(RESULT, ended={"a-2": "out of memory"})).holds
