from __future__ import annotations

from pathlib import Path

import pytest

from stages.errors import CheckpointError
from trainer.log import StepLog, read_records


def test_records_come_back_in_order(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run.jsonl")
    assert read_records(log.path) == []
    for step in (1, 2):
        log.append({"step": step, "nats": 0.5})
    log.flush()
    assert read_records(log.path) == [{"step": 1, "nats": 0.5}, {"step": 2, "nats": 0.5}]


@pytest.mark.parametrize("torn", ['{"step": 3, "na', "{", "3", '{"nats": 1}', "\x00\x00\xff"])
def test_a_torn_last_line_is_forgotten(tmp_path: Path, torn: str) -> None:
    log = StepLog(tmp_path / "run.jsonl")
    log.append({"step": 1})
    with log.path.open("a") as file:
        file.write(torn)
    assert read_records(log.path) == [{"step": 1}]
    log.cut(5)
    log.append({"step": 2})
    assert [record["step"] for record in read_records(log.path)] == [1, 2]
    assert len(log.path.read_text().splitlines()) == 2


def test_cutting_forgets_later_steps_and_final_evaluations(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run.jsonl")
    log.cut(0)
    for step in (1, 2, 3):
        log.append({"step": step})
    log.append({"step": 2, "final": True})
    log.cut(2)
    assert read_records(log.path) == [{"step": 1}, {"step": 2}]


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write .*run.jsonl: No such file or directory; free some space"):
        StepLog(tmp_path / "nowhere" / "run.jsonl").append({"step": 1})
