"""What a stand is made of: a log that is read while it grows, a view, a process that is ended in many ways."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from loadtest.training.ground import open_ground
from loadtest.training.journal import FIRST, Journal
from loadtest.training.program import Program
from loadtest.training.view import View
from stages.errors import ServiceError

SPEAKS = "import time; print('here', flush=True); time.sleep(600)"


def chained(records: list[dict[str, object]]) -> list[bytes]:
    lines, last = [], FIRST
    for record in records:
        lines.append(json.dumps({"before": last, **record}).encode() + b"\n")
        last = hashlib.sha256(lines[-1]).hexdigest()
    return lines


def test_a_journal_takes_whole_lines_only_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal = Journal(path)
    assert journal.look() == []
    accepted = {"kind": "accepted", "part": "p", "id": "a"}
    run, first, closed = chained([{"kind": "run"}, accepted, {"kind": "closed", "part": "p", "updates": ["a"]}])
    path.write_bytes(run + first[:-9])
    assert [entry.kind for entry in journal.look()] == ["run"]
    path.write_bytes(run + first + closed)
    assert [entry.kind for entry in journal.look()] == ["accepted", "closed"]
    assert (journal.accepted, journal.closed("p"), journal.closed("q")) == (1, 1, 0)
    assert journal.look() == []


def test_a_journal_that_was_changed_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    run, first = chained([{"kind": "run"}, {"kind": "accepted", "part": "p", "id": "a"}])
    path.write_bytes(run + first)
    journal = Journal(path)
    journal.look()
    path.write_bytes(run + first + first)
    with pytest.raises(ServiceError, match="does not go on"):
        journal.look()
    path.write_bytes(run)
    with pytest.raises(ServiceError, match="shorter"):
        journal.look()


def test_a_view_reads_what_the_coordinator_leaves_out_as_nothing() -> None:
    record = {
        "run": "abc",
        "rounds": "9",
        "parts": [{"name": "block-0", "round": "3"}, {"part": 1, "name": "block-1"}],
        "workers": [{"worker": "w0", "doing": "DOING_TRAINING", "accepted": "2", "gone": True}],
    }
    view = View.parse(json.dumps(record), 5.0)
    assert (view.rounds, view.least_round, view.finished, view.at_s) == (9, 0, False, 5.0)
    worker = view.worker("w0")
    assert worker is not None
    assert (worker.doing, worker.accepted, worker.refused, worker.gone) == ("training", 2, 0, True)
    assert view.worker("w1") is None


def wait_for(path: Path, text: str) -> None:
    while text not in path.read_text():
        time.sleep(0.01)


@pytest.mark.timeout(120)
def test_a_program_is_killed_frozen_stopped_and_started_again(tmp_path: Path) -> None:
    with open_ground("loopback", 1) as ground:
        command = ground.command("host-1", [sys.executable, "-c", SPEAKS])
    program = Program("p", command, tmp_path / "p.log")
    assert (program.pid, program.ended) == (None, None)
    program.start()
    first = program.pid
    program.start()
    assert program.pid == first, "it runs already"
    program.kill()
    assert (program.pid, program.ended) == (None, -signal.SIGKILL)
    program.start()
    wait_for(program.log, "here")
    program.freeze()
    program.stop()
    assert program.ended == -signal.SIGTERM, "a frozen one hears of it, too"
    assert program.starts == 2
    assert "here" in program.last_words()


@pytest.mark.timeout(120)
def test_a_program_whose_disk_is_full_is_told_so(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
path = pathlib.Path(sys.argv[1])
while not (path / "end").exists():
    try:
        (path / "file").write_bytes(bytes(10))
        (path / "whole").touch()
    except OSError:
        (path / "full").touch()
    time.sleep(0.01)
"""
    program = Program("p", [sys.executable, "-c", code, str(tmp_path)], tmp_path / "p.log")
    program.start()

    def seen(name: str) -> None:
        (tmp_path / name).unlink(missing_ok=True)
        while not (tmp_path / name).exists():
            assert program.pid, program.last_words()
            time.sleep(0.01)

    seen("whole")
    program.limit_files(0)
    seen("full")
    program.limit_files(None)
    seen("whole")
    (tmp_path / "end").touch()
    assert program.wait(60.0) == 0
