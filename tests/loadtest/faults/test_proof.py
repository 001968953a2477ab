"""The proof finds what was lost, doubled or changed, and the account how long work was away."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from onesweep.loadtest.faults.byzantine_worker import LIES
from onesweep.loadtest.faults.proof import STATE, Statement, StateReader, handed_in, prove, tensors_digest
from onesweep.loadtest.faults.training_observer import LogEntry
from onesweep.loadtest.faults.training_report import outcomes_by_lie
from onesweep.loadtest.faults.training_run import TrainingFaultRecord, final_nats, refusals, with_waits
from onesweep.trainer.blocks.state import digest
from onesweep.trainer.rounds.codecs import CODECS, TensorCodec, shapes

TENSORS = {"b": np.ones((2, 3), np.float32), "a": np.float32([1, 2])}


def accepted(name: str, worker: str, round_: int = 0, sha256: str = "x") -> dict[str, Any]:
    return {"kind": "accepted", "part": "p", "id": name, "worker": worker, "round": round_, "sha256": sha256}


def closed(round_: int, *names: str, sha256: str = "v") -> dict[str, Any]:
    return {"kind": "closed", "part": "p", "round": round_, "updates": list(names), "sha256": sha256}


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    """Of a part that made one round."""
    (tmp_path / "versions" / "p").mkdir(parents=True)
    save_file(TENSORS, tmp_path / "versions" / "p" / "1.safetensors")
    return tmp_path


RUN = {"kind": "run", "parts": {"p": ""}}
GOOD = [RUN, accepted("a", "w0"), accepted("b", "w1"), closed(0, "a", "b", sha256=tensors_digest(TENSORS))]


def test_a_log_without_fault_is_proved(versions: Path) -> None:
    told = [Statement("w0", "p", 0, "a", "x"), Statement("w1", "p", 1, "never sent", "y")]
    proof = prove(GOOD, 1, told, {"w0": {("p", 0)}, "w1": set()}, versions)
    assert (proof.problems, proof.accepted, proof.merged, proof.heard, proof.compared) == ([], 2, 2, 1, 1)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([RUN, accepted("a", "w0"), *GOOD[1:]], "a of p was accepted twice"),
        ([*GOOD[:3], accepted("c", "w0"), GOOD[3]], "w0 handed in 2 updates for round 0 of p"),
        ([*GOOD[:3], accepted("c", "w2"), GOOD[3]], "c of p was accepted and never merged"),
        ([*GOOD[:2], GOOD[3]], "round 0 of p merged b, which was not accepted before"),
        ([*GOOD[:3], {**GOOD[3], "updates": ["a", "b", "a"]}], "a of p was merged 2 times"),
        (GOOD[:3], "p made 0 rounds of 1"),
        ([*GOOD[:3], {**GOOD[3], "sha256": "other"}], "the last version of p is not what its merge was logged with"),
    ],
)
def test_what_was_lost_doubled_or_changed_is_found(records: list[dict[str, Any]], words: str, versions: Path) -> None:
    assert words in prove(records, 1, [], {}, versions).problems


def test_what_workers_know_otherwise_is_found(versions: Path) -> None:
    told = [Statement("w0", "p", 0, "a", "other")]
    proof = prove(GOOD, 1, told, {"w1": {("p", 0), ("p", 7)}}, versions)
    assert proof.problems == [
        "w1 heard that round 7 of p was taken; it is not in the log",
        "a of p is not what w0 made",
    ]


def test_the_digest_is_that_of_the_log() -> None:
    assert tensors_digest(TENSORS) == digest({name: torch.from_numpy(array) for name, array in TENSORS.items()})


@pytest.mark.parametrize("codec", [CODECS["fp32"], CODECS["int8"]], ids=lambda codec: codec.name)
def test_an_update_that_waits_in_a_state_is_hashed_there(codec: TensorCodec, tmp_path: Path) -> None:
    like = {name: torch.from_numpy(array) for name, array in TENSORS.items()}
    data = codec.encode(like)
    record = {"part": "p", "pieces": [{"pending": {"id": "r3-x", "round": 3}}]}
    modules = {f"module/{name}": array for name, array in TENSORS.items()}
    payload = {"payload0": np.frombuffer(data, np.uint8)}
    save_file({**modules, **payload}, tmp_path / STATE, {"record": json.dumps(record)})
    reader = StateReader(codec.name)
    reader.look({"w0": tmp_path, "w1": tmp_path / "nothing"})
    expected = Statement("w0", "p", 3, "r3-x", digest(codec.decode(data, shapes(like))))
    assert reader.statements == {("p", "r3-x"): expected}


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


def test_lies_are_what_they_are_called() -> None:
    direction = np.float32([3, -4])
    assert np.isnan(LIES["nan"](direction, 2.0)).all()
    np.testing.assert_allclose(LIES["flipped"](direction, 2.0), [-1.2, 1.6], rtol=1e-6)
    assert np.linalg.norm(LIES["scaled"](direction, 2.0)) == pytest.approx(10.0)
    assert np.linalg.norm(LIES["absurd"](direction, 2.0)) == pytest.approx(2000.0)
    told = outcomes_by_lie([{"lie": "nan", "outcome": "refused"}, {"lie": "nan", "outcome": "refused"}])
    assert told == {"nan": Counter(refused=2)}


def test_the_end_of_the_model_is_its_last_block() -> None:
    assert final_nats({"next byte, block 9": 3.0, "next byte, block 10": 2.0}) == 2.0
