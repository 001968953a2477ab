"""The scripted model: nothing is lost, a seed decides all, and planted faults of what decides are found."""

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.simulation.loop import captured_log
from loadtest.simulation.search import search, shrink, trouble_of
from serving.router.journal import Journal, Tries
from stages.host.admission import HopAdmission

sys.path.append(str(Path(__file__).parents[3] / ".ci"))
schedules: Any = importlib.import_module("schedules")
sys.path.pop()


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with captured_log():
        yield schedules.Script()


def first_trouble(script: Any, seeds: Iterable[int]) -> int | None:
    schedules = map(script.schedule, seeds)
    return next((each.seed for each in schedules if trouble_of(each, script.run(each), script.answers)), None)


def test_no_request_is_lost_and_a_seed_repeats_its_events(script: Any) -> None:
    assert first_trouble(script, [*range(100), 2253, 1023788, 10093255]) is None  # the last three found a fault each
    events = [script.run(script.schedule(seed)).events for seed in (*range(5), *range(5))]
    assert events[:5] == events[5:]
    assert len(set(events)) == 5
    # on any machine, until clients, routers or hosts send something else
    assert hash(tuple(events[:5])) == 8352973175854858679


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (Journal, "due", property(lambda journal: journal.work.number)),
        (Tries, "_blame", lambda *_: None),
        (HopAdmission, "_open", lambda self, hop, *_: self.sessions.sessions[hop.session]),
    ],
)
def test_planted_faults_are_found(
    script: Any, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any
) -> None:
    monkeypatch.setattr(where, name, instead)
    seed = first_trouble(script, range(100))
    assert seed is not None
    assert len(shrink(script, script.schedule(seed)).faults) < 3


def test_the_report_has_the_command_that_repeats_a_failure(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tries, "_blame", lambda *_: None)
    report = search(100, 0, script, "python .ci/schedules.py")
    assert not report.passed
    assert "python .ci/schedules.py --schedules 1 --seed" in report.table
