"""A training seen from outside: events that are read while they are written, and views of the run."""

import json
from pathlib import Path

import pytest

from loadtest.faults.training_observer import EventFollower, RunView
from stages.errors import ServiceError
from trainer.rounds.store import DATABASE, open_store


def test_events_are_read_while_they_are_written_and_each_once(tmp_path: Path) -> None:
    follower = EventFollower(tmp_path / DATABASE)
    assert follower.look() == []
    with open_store(tmp_path) as store:
        store.commit({"kind": "run"})
        assert [entry.kind for entry in follower.look()] == ["run"]
        store.commit({"kind": "accepted", "part": "p", "id": "a", "worker": "w", "round": 0})
        store.commit({"kind": "closed", "part": "p", "round": 0, "updates": ["a"]})
        assert [entry.kind for entry in follower.look()] == ["accepted", "closed"]
        assert (follower.accepted, follower.closed("p"), follower.closed("q")) == (1, 1, 0)
        assert follower.look() == []
        store.database.execute("DELETE FROM events")
        store.database.commit()
        with pytest.raises(ServiceError, match="has 0 events, and had 3"):
            follower.look()


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
