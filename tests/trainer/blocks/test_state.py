import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages.errors import CheckpointError, ResumeError
from trainer.blocks.state import StepLog, load_state, read_records, save_state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "block-0.state.safetensors"
    save_state(path, {"step": 5, "spent_s": 2.5}, {"a": torch.arange(64.0).view(2, 32).T, "b": torch.tensor(3.0)})
    return path


def test_a_state_is_loaded_as_it_was_saved(saved: Path) -> None:
    record, tensors = load_state(saved)
    assert record == {"step": 5, "spent_s": 2.5}
    assert tensors.keys() == {"a", "b"}
    assert torch.equal(tensors["a"], torch.arange(64.0).view(2, 32).T)
    saved.unlink()
    os.mkfifo(saved)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load_state(saved)


def flip(raw: bytearray) -> bytes:
    raw[-50] ^= 1
    return raw


def retype(raw: bytearray) -> bytes:
    return raw.replace(b'F32","shape":[]', b'BF16","shape":[2]').replace(b"}}  ", b"}}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-100], "cannot read"),
        (lambda raw: b"nothing of the kind", "cannot read"),
        (flip, "is damaged: its tensors do not match the recorded SHA-256"),
        (lambda raw: raw.replace(b"2.5", b"9.5"), "is damaged: its tensors do not match the recorded SHA-256"),
        (retype, "is damaged: its tensors do not match the recorded SHA-256"),
        (lambda raw: raw.replace(b'"record"', b'"recorD"'), "is damaged"),
    ],
)
def test_a_damaged_state_is_refused(saved: Path, damage: Callable[[bytearray], bytes], message: str) -> None:
    saved.write_bytes(damage(bytearray(saved.read_bytes())))
    with pytest.raises(ResumeError, match=message) as caught:
        load_state(saved)
    assert "delete it to start over" in str(caught.value)


@pytest.mark.parametrize("torn", ['{"step": 3, "na', "{", "3", '{"nats": 1}', "\x00\x00\xff"])
def test_a_torn_last_line_is_ignored(tmp_path: Path, torn: str) -> None:
    log = StepLog(tmp_path / "run.jsonl")
    log.append({"step": 1})
    with log.path.open("a") as file:
        file.write(torn)
    assert read_records(log.path) == [{"step": 1}]
    log.cut(5)
    log.append({"step": 2})
    assert [record["step"] for record in read_records(log.path)] == [1, 2]
    assert len(log.path.read_text().splitlines()) == 2


def test_cutting_removes_later_steps_and_final_evaluations(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run.jsonl")
    log.cut(0)
    for step in (1, 2, 3):
        log.append({"step": step})
    log.append({"step": 2, "final": True})
    log.cut(2)
    assert read_records(log.path) == [{"step": 1}, {"step": 2}]
