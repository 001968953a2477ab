"""A training seen from outside: events that are read while they are written, and the status of the run."""

import json
from pathlib import Path

import pytest

from loadtest.faults.training_observer import EventFollower, parse_update
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
        assert (follower.closed("p"), follower.closed("q")) == (1, 0)
        assert follower.look() == []
        store.database.execute("DELETE FROM events")
        store.database.commit()
        with pytest.raises(ServiceError, match="has 0 events, and had 3"):
            follower.look()


def test_what_the_coordinator_leaves_out_is_nothing() -> None:
    record = {
        "run": "abc",
        "rounds": "9",
        "parts": [{"name": "block-0", "round": "3"}, {"part": 1, "name": "block-1"}],
        "workers": [{"worker": "w0", "round": "2", "busy_seconds": 1.5, "gone": True}],
    }
    update = parse_update(json.dumps(record))
    assert (update.rounds, [part.round for part in update.parts], update.received_bytes) == (9, [3, 0], 0)
    (worker,) = update.workers
    assert (worker.round, worker.steps, worker.busy_seconds) == (2, 0, 1.5)
