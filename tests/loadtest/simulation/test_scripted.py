"""The scripted model: nothing is lost, a seed decides all, and planted faults of what decides are found."""

from typing import Any

import pytest

from loadtest.simulation.search import Script, fewest, search, trouble_of
from serving.router.journal import Journal, Tries
from stages.host.admission import HopAdmission


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


def first_trouble(script: Script, seeds: range) -> int | None:
    schedules = map(script.schedule, seeds)
    return next((each.seed for each in schedules if trouble_of(each, script.run(each), script.answers)), None)


def test_nothing_is_lost_and_the_same_seed_gives_the_same_events(script: Script) -> None:
    assert first_trouble(script, range(100)) is None
    events = [script.run(script.schedule(seed)).events for seed in (*range(5), *range(5))]
    assert events[:5] == events[5:]
    assert len(set(events)) == 5


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (Journal, "due", property(lambda journal: journal.work.number)),
        (Tries, "_blame", lambda *_: None),
        (HopAdmission, "_open", lambda self, hop, *_: self.sessions.sessions[hop.session]),
    ],
)
def test_planted_faults_are_found(
    script: Script, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any
) -> None:
    monkeypatch.setattr(where, name, instead)
    seed = first_trouble(script, range(100))
    assert seed is not None
    assert len(fewest(script, script.schedule(seed)).faults) < 3


def test_the_report_says_how_to_see_a_failure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tries, "_blame", lambda *_: None)
    report = search(100, 0, lambda words: None, is_scripted=True)
    assert not report.holds
    assert "bench chaos --simulate scripted --schedules 1 --seed" in report.table
