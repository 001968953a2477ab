"""Real processes on loopback: a worker is killed, another stands still, and nothing is lost."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.faults.base import FaultRecord
from loadtest.faults.settings import TrainingChaosSettings
from loadtest.faults.training_run import (
    check_training_chaos,
    handed_in,
    lost_updates,
    recovered,
    train_under_faults,
    training_report,
    trouble,
    verdict,
)
from loadtest.faults.training_testbed import EventFollower, LogEntry
from stages.errors import InputError, ServiceError
from trainer.rounds.store import DATABASE, open_store

RUN = """
sequences = 2
warmup_steps = 2
bfloat16 = false
architecture = { parts = 1, layers = 1, width = 16, heads = 2, context_length = 32, code_dim = 8, condition_dim = 8 }
[noise]
partition = "equal_probability"
[rounds]
steps_per_round = 2
rounds = 24
deadline = "lockstep"
codec = "fp32"
robust = "scored"
"""
SEED, LEASE_S = 0, 60.0
"""A lockstep run waits so long for who was killed, and is not over before he is back; the seed has him killed first."""
WORDS = ["the", "ship", "sailed", "north", "and", "nobody", "saw", "it", "again"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw, path = random.Random(0), tmp_path / "text.txt"
    path.write_text(" ".join(draw.choice(WORDS) for _ in range(2000)))
    return path


@pytest.fixture
def settings(tmp_path: Path, text: Path) -> TrainingChaosSettings:
    """Of one block and two workers."""
    config = tmp_path / "run.toml"
    config.write_text(RUN)
    return TrainingChaosSettings(
        seed=SEED,
        seeds=(0,),
        profile="loopback",
        faults=("kill", "freeze"),
        count=2,
        config=config,
        data=text,
        lease_s=LEASE_S,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_lose_no_update(settings: TrainingChaosSettings) -> None:
    (result,) = train_under_faults(settings, lambda words: None)
    assert result.losses == 0, verdict([result])
    assert (sorted(fault.kind for fault in result.faults), result.left_out) == (["freeze", "kill"], ())
    assert result.heard > 12
    worse = replace(result, undisturbed={"next_byte": result.scores["next_byte"] - 0.05})
    assert (trouble([worse]), trouble([worse, worse])) == (1, 1), "no verdict can hold by itself"
    assert "the aim of at most 0.03 does not hold" in verdict([worse, worse])[-1]
    report = training_report([result])
    assert "undisturbed" in report.table
    assert report.record["runs"][0]["rounds"] == 24


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[rounds]\nmodel = 'ar'", "not of 'ar'"),
        ("[rounds]\nfragments = 2", "not in 2 fragments"),
        ("rounds = 3", "rounds must be a section"),
        ("[architecture]\nparts = 0", "parts must be a whole number from 1"),
        ("[rounds]\nreplicas = 1000", "find room here"),
        ("]", "is not TOML"),
    ],
)
def test_a_run_that_cannot_be_broken_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        check_training_chaos(TrainingChaosSettings(config=path, profile="loopback"))


def test_loopback_has_every_fault_but_a_cut_link() -> None:
    _, selection = check_training_chaos(TrainingChaosSettings(minutes=1.0, profile="loopback"))
    assert [fault.name for fault in selection.able] == ["kill", "freeze", "coordinator"]
    assert (selection.count, [why[:9] for why in selection.left_out]) == (3, ["fault cut"])


def test_logs_say_what_was_taken_and_what_was_not(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text(
        "INFO round 3 of block-0 is handed in\nWARNING round 4 of block-0 was not taken: it is 12 rounds old\n"
    )
    assert handed_in(log) == {("block-0", 3)}


def test_what_workers_know_otherwise_is_found() -> None:
    run = {"kind": "run", "parts": {"p": ""}}
    taken = {"kind": "accepted", "part": "p", "worker": "w0", "round": 0}
    entries = [LogEntry(0.0, record) for record in (run, taken, {"kind": "closed", "part": "p"})]
    assert lost_updates(entries, {"w0": {("p", 0)}}, 1) == []
    assert lost_updates(entries, {"w0": {("p", 7)}}, 2) == [
        "p made 1 rounds of 2",
        "w0 heard that round 7 of p was taken: it is known 0 times",
    ]


def test_the_worker_that_was_hit_has_to_hand_in_again() -> None:
    def accepted(at_s: float, worker: str) -> LogEntry:
        return LogEntry(at_s, {"kind": "accepted", "part": "p", "worker": worker})

    closed = LogEntry(15.0, {"kind": "closed", "part": "p"})
    entries = [accepted(1.0, "w0"), accepted(12.0, "w1"), closed, accepted(16.0, "w1"), accepted(20.0, "w0")]
    assert recovered(FaultRecord("kill", "w0", 10.0, 14.0), entries)
    assert not recovered(FaultRecord("kill", "w1", 10.0, 17.0), entries)
    assert recovered(FaultRecord("coordinator", "coordinator", 10.0, 17.0), entries)


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
