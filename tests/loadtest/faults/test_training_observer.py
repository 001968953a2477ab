"""A training seen from outside: events that are read while they are written, and places."""

from pathlib import Path

import pytest

from loadtest.faults.training_observer import EventFollower
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
        store.save_members([{"worker": "w", "part": 0, "replica": 1}])
        assert (follower.replica("w"), follower.replica("x")) == (1, None)
        store.database.execute("DELETE FROM events")
        store.database.commit()
        with pytest.raises(ServiceError, match="has 0 events, and had 3"):
            follower.look()
