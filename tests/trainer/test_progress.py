from __future__ import annotations

from trainer.progress import Moment, Progress, State


def test_time_left_follows_the_pace(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.progress.time.monotonic", lambda: now[0])
    progress = Progress()
    assert progress.now == Moment()
    progress.begin("block-1", step=10, steps=40)
    assert progress.now.seconds_left is None
    now[0] = 120.0
    progress.reach(20)
    assert progress.now == Moment("block-1", 20, 40, {}, 40.0, State.RUNNING)


def test_losses_are_the_last_of_each_name() -> None:
    progress = Progress()
    progress.begin("ar", 0, 10)
    progress.record({"a_nats": 2.0, "b_nats": 1.0})
    first = progress.now
    progress.record({"a_nats": 1.5})
    assert progress.now.losses == {"a_nats": 1.5, "b_nats": 1.0}
    assert first.losses == {"a_nats": 2.0, "b_nats": 1.0}, "a moment that was read does not change"
    progress.begin("next", 0, 10)
    assert progress.now.losses == {}


def test_which_states_are_ends() -> None:
    assert {state for state in State if state.ended} == {State.FINISHED, State.STOPPED, State.FAILED}
