"""Real processes on loopback: a worker is killed, another is replaced by a saboteur, and nothing is lost."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from onesweep.loadtest.faults.settings import DemoSettings, TrainingChaosSettings
from onesweep.loadtest.faults.training_demo import train_and_serve
from onesweep.loadtest.faults.training_report import training_record, training_report, verdict
from onesweep.loadtest.faults.training_run import check_training_chaos, final_nats, run_training_chaos
from onesweep.stages.errors import InputError

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
    assert result.proof.merged + len(left_out) == result.proof.accepted >= 24
    assert result.proof.heard > 12
    assert result.proof.compared > 0
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


def test_the_run_that_ships_is_as_long_as_it_is_to_take() -> None:
    run = TrainingChaosSettings(minutes=15.0).runs()[1].run_file()
    assert (run.parts, run.replicas, run.codec) == (2, 3, "fp32")
    assert "rounds = 50\n" in run.text
    assert run.text.startswith("seed = 1\n")


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
