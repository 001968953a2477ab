"""A training seen from outside: a log that is read while it grows, and views of the run."""

import hashlib
import json
from pathlib import Path

import pytest

from onesweep.loadtest.faults.training_observer import FIRST_DIGEST, LogFollower, RunView
from onesweep.stages.errors import ServiceError


def chained(records: list[dict[str, object]]) -> list[bytes]:
    lines, last = [], FIRST_DIGEST
    for record in records:
        lines.append(json.dumps({"before": last, **record}).encode() + b"\n")
        last = hashlib.sha256(lines[-1]).hexdigest()
    return lines


def test_a_journal_takes_whole_lines_only_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal = LogFollower(path)
    assert journal.look() == []
    accepted = {"kind": "accepted", "part": "p", "id": "a"}
    run, first, closed = chained([{"kind": "run"}, accepted, {"kind": "closed", "part": "p", "updates": ["a"]}])
    path.write_bytes(run + first[:-9])
    assert [entry.kind for entry in journal.look()] == ["run"]
    path.write_bytes(run + first + closed)
    assert [entry.kind for entry in journal.look()] == ["accepted", "closed"]
    assert (journal.accepted, journal.closed("p"), journal.closed("q")) == (1, 1, 0)
    assert journal.look() == []


def test_a_journal_that_was_changed_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    run, first = chained([{"kind": "run"}, {"kind": "accepted", "part": "p", "id": "a"}])
    path.write_bytes(run + first)
    journal = LogFollower(path)
    journal.look()
    path.write_bytes(run + first + first)
    with pytest.raises(ServiceError, match="does not go on"):
        journal.look()
    path.write_bytes(run)
    with pytest.raises(ServiceError, match="shorter"):
        journal.look()


def test_a_view_reads_what_the_coordinator_leaves_out_as_nothing() -> None:
    record = {
        "run": "abc",
        "rounds": "9",
        "parts": [{"name": "block-0", "round": "3"}, {"part": 1, "name": "block-1"}],
        "workers": [{"worker": "w0", "round": "2", "busy_seconds": 1.5, "gone": True}],
    }
    view = RunView.parse(json.dumps(record), 5.0)
    assert (view.update.rounds, view.least_round, view.finished, view.at_s) == (9, 0, False, 5.0)
    worker = view.worker("w0")
    assert worker is not None
    assert (worker.round, worker.steps, worker.busy_seconds) == (2, 0, 1.5)
    assert view.worker("w1") is None
