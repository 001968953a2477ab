"""Real processes on loopback: a worker is killed, another is replaced by a saboteur, and nothing is lost."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.faults.settings import DemoSettings, TrainingChaosSettings
from loadtest.faults.training_demo import train_and_serve
from loadtest.faults.training_observer import LogEntry
from loadtest.faults.training_report import training_record, training_report, verdict
from loadtest.faults.training_run import (
    TrainingFaultRecord,
    check_training_chaos,
    final_nats,
    handed_in,
    lost_updates,
    paired,
    refusals,
    run_training_chaos,
    with_waits,
)
from stages.errors import InputError

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
DEMO = """
steps = 4
sequences = 2
architecture = { parts = 1, layers = 1, width = 32, heads = 2, context_length = 64 }
[rounds]
steps_per_round = 2
replicas = 1
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
        faults=("kill", "nan", "kept-back"),
        count=3,
        config=config,
        data=text,
        lease_s=LEASE_S,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_lose_no_update(settings: TrainingChaosSettings) -> None:
    result = run_training_chaos(settings, lambda words: None)
    assert result.losses == 0, verdict(result)
    assert (sorted(fault.kind for fault in result.faults), result.left_out) == (["kept-back", "kill", "nan"], ())
    refused = [v["reason"] for v in result.verdicts if v["outcome"] == "refused"]
    assert refused
    assert all("not finite" in reason for reason in refused)
    lies = {v["id"] for v in result.verdicts if v["outcome"] == "accepted"}
    left_out = {name for entry in result.entries if entry.kind == "closed" for name in entry.record["left_out"]}
    assert lies
    assert lies <= left_out, "whose updates pass every check"
    assert result.heard > 12
    worse = replace(result.reference, scores={"next byte, block 0": final_nats(result.scores) - 0.05})
    lost = replace(result, reference=worse)
    assert (lost.trouble, replace(lost, others=[lost, lost]).trouble) == (1, 1), "no verdict can hold by itself"
    assert "the aim of at most 0.03 does not hold" in "\n".join(verdict(replace(lost, others=[lost, lost])))
    record = training_record(result)
    assert len(record["log"]) == len(result.entries)
    assert "nan" in training_report(result).table


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


def test_a_saboteur_stays_away_where_it_cannot_speak(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[rounds]\ncodec = 'e3m0'")
    settings = TrainingChaosSettings(config=path, minutes=1.0, profile="loopback")
    _, selection = check_training_chaos(settings)
    kinds = tuple(fault.name for fault in selection.able)
    assert kinds == ("kill", "freeze", "twin", "old-state", "coordinator", "disk")
    assert selection.count == 6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_trained_is_served(tmp_path: Path, text: Path) -> None:
    (tmp_path / "run.toml").write_text(DEMO)
    said: list[str] = []
    settings = DemoSettings(config=tmp_path / "run.toml", data=text, profile="loopback", max_bytes=16)
    made = train_and_serve(settings, said.append)
    assert made.rounds == 2
    assert made.sweeps == 1
    assert 4.0 < made.next_byte_nats < 6.0
    assert made.moved_bytes > 10_000
    assert "round 2 of 2: block-0 " in "\n".join(said)


def test_logs_say_what_was_taken_and_what_was_not(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text(
        "INFO round 3 of block-0 is handed in\nWARNING round 4 of block-0 was not taken: it is 12 rounds old\n"
        "WARNING round 5 was closed without us: it is given up\n"
    )
    assert handed_in([log, tmp_path / "none"]) == {("block-0", 3)}
    assert refusals([log]) == Counter(
        {"it is N rounds old": 1, "given up by its worker, for the round was closed long ago": 1}
    )


def test_what_workers_know_otherwise_is_found() -> None:
    run = {"kind": "run", "parts": {"p": ""}}
    taken = {"kind": "accepted", "part": "p", "worker": "w0", "round": 0}
    entries = [LogEntry(0.0, record) for record in (run, taken, {"kind": "closed", "part": "p"})]
    assert lost_updates(entries, {"w0": {("p", 0)}}, 1) == []
    assert lost_updates(entries, {"w0": {("p", 7)}}, 2) == [
        "p made 1 rounds of 2",
        "w0 heard that round 7 of p was taken: it is known 0 times",
    ]


def test_the_interval_is_students() -> None:
    """Differences 0.01, 0.03, 0.02: deviation 0.01, and 4.303 / sqrt(3) of it."""
    found = paired([1.01, 1.53, 2.02], [1.0, 1.5, 2.0])
    assert found.mean == pytest.approx(0.02)
    assert found.half == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert str(found) == "+0.0200 ± 0.0248"
    assert str(paired([1.5], [1.25])) == "+0.2500 (one seed: no interval)"


def test_waits_are_those_of_the_part_and_the_worker_that_were_hit() -> None:
    def entry(at_s: float, kind: str, part: str, worker: str = "") -> LogEntry:
        return LogEntry(at_s, {"kind": kind, "part": part, "worker": worker})

    entries = [
        entry(1.0, "accepted", "p", "w0"),
        entry(11.0, "accepted", "q", "w2"),
        entry(12.0, "accepted", "p", "w1"),
        entry(13.0, "closed", "p"),
        entry(20.0, "accepted", "p", "w0"),
    ]
    hit = with_waits(TrainingFaultRecord("kill", "w0", 10.0, 14.0, part="p"), entries)
    assert (hit.accepted_s, hit.merged_s, hit.back_s) == (2.0, 3.0, 6.0)
    whole = with_waits(TrainingFaultRecord("coordinator", "coordinator", 10.0, 14.0, part=""), entries)
    assert (whole.accepted_s, whole.merged_s, whole.back_s) == (1.0, 3.0, 6.0)
    assert with_waits(TrainingFaultRecord("kill", "w9", 10.0, 14.0, part="r"), entries).merged_s is None
