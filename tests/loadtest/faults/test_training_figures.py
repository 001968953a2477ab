"""`bench chaos-training --faults none`: its links, the figures that it reads off a run, and a run of real processes."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.faults import training_figures
from loadtest.faults.settings import TrainingChaosSettings
from loadtest.faults.training_figures import (
    WorkerLoad,
    measure_training,
    round_seconds,
    with_uplinks,
    worker_loads,
)
from loadtest.faults.training_observer import LogEntry, RunView
from loadtest.faults.training_run import check_training_chaos
from loadtest.lab.profile import ROUTER, profile_named
from serving.cli.parser import parse
from trainer.v1.rounds_pb2 import WatchUpdate, WorkerStatus

SHIPPED = ("lan", "links-20", "links-60", "links-150", "three-regions", "consumer")


@pytest.mark.parametrize("name", SHIPPED)
def test_slow_uplinks_change_nothing_but_their_rate(name: str) -> None:
    slow, known = with_uplinks(profile_named(name), 6, 5.0), profile_named(name)
    assert slow.link("host-6", ROUTER) == replace(known.link("host-6", ROUTER), rate_mbps=5.0)
    for ends in ((ROUTER, "host-6"), ("host-1", "host-2")):
        assert slow.link(*ends) == known.link(*ends)


def closed(part: str, at_s: float) -> LogEntry:
    return LogEntry(at_s, {"kind": "closed", "part": part})


def test_a_round_is_timed_from_the_first_merge_on() -> None:
    entries = [closed("a", 100), closed("b", 101), closed("a", 103), LogEntry(104, {"kind": "accepted", "part": "a"})]
    assert round_seconds([*entries, closed("b", 106), closed("a", 108), closed("b", 111)]) == 5
    assert round_seconds(entries[:2]) is None


def view(at_s: float, round_: int, steps: int, busy_s: float) -> RunView:
    worker = WorkerStatus(worker="w0", round=round_, steps=steps, busy_seconds=busy_s)
    return RunView(at_s, WatchUpdate(rounds=9, workers=[worker]))


def test_a_share_is_taken_between_two_things_that_a_worker_said() -> None:
    views = [view(0, 0, 3, 1.0), view(9, 1, 0, 5.0), view(10, 1, 0, 5.0), view(12, 1, 5, 7.0), view(14, 1, 5, 7.0)]
    assert worker_loads(views, 10) == [], "twice is the least"
    later = [view(22, 2, 5, 16.0), view(23, 2, 5, 16.0)]
    assert worker_loads([*views, *later], 10) == [WorkerLoad("w0", (16 - 7) / (22 - 12), (16 - 7) / 10)]


SETTINGS = """
steps = 80
sequences = 2
warmup_steps = 2
architecture = { parts = 1, layers = 1, width = 16, heads = 2, context_length = 32 }
[rounds]
model = "ar"
steps_per_round = 20
deadline = "lockstep"
"""


def answered_here(arguments: Sequence[str], within_s: float) -> dict[str, Any]:
    """As a process would, without the seconds that it takes to start."""
    options, said = parse([*arguments, "--json"]), io.StringIO()
    with contextlib.redirect_stdout(said):
        assert options.run(options) == 0
    answer: dict[str, Any] = json.loads(said.getvalue())
    return answer


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_planned_is_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # such a run is over before a worker has reported twice how busy it was
    monkeypatch.setattr(training_figures, "worker_loads", lambda *_: [WorkerLoad("w0", 0.9, 0.05)])
    monkeypatch.setattr(training_figures, "answer_of", answered_here)
    (tmp_path / "run.toml").write_text(SETTINGS)
    settings = TrainingChaosSettings(
        config=tmp_path / "run.toml", profile="loopback", faults=(), seeds=(0,), up_mbps=None, pace_s=0.02
    )
    check_training_chaos(settings)
    figures = measure_training(settings, print)
    rows = {name: (mean, planned) for name, mean, planned in figures.rows()}
    measured, planned = rows["bytes, coordinator (MB)"]
    assert measured == planned
    assert "bytes, links (MB)" not in rows, "loopback does not count"
    assert abs(rows["less that of one place"][0]) < 0.5, "two losses of the same model, hardly trained"
    assert figures.table().startswith("4 rounds of 20 steps, 1 seeds\n")
    record = json.loads(json.dumps(figures.record()))
    assert record["runs"]["0"]["payload_bytes"] == record["plan"]["all_bytes"]
