"""Programs that are killed, frozen, stopped and started again; disks that are full; commands that fail."""

import errno
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onesweep.loadtest.faults.process import Program, answer_of, open_disk
from onesweep.loadtest.workload.testbed import open_network
from onesweep.stages.errors import OnesweepError

pytestmark = pytest.mark.slow

SPEAKS = "import time; print('here', flush=True); time.sleep(600)"
PATIENCE_S = 100.0
OWNER = """
import pathlib, sys
from onesweep.loadtest.faults.process import open_disk
with open_disk(pathlib.Path(sys.argv[1])) as disk:
    (disk.path / "file").write_bytes(bytes(5000))
    print(disk.path, flush=True)
    sys.stdin.read()
"""


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_full_disk_takes_nothing_until_it_is_given_room(tmp_path: Path) -> None:
    with open_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("no file system can be mounted here")
        disk.fill()
        (disk.path / "empty").touch()
        with pytest.raises(OSError, match="No space left") as refused:
            (disk.path / "file").write_bytes(b"1")
        assert refused.value.errno == errno.ENOSPC
        disk.free()
        (disk.path / "file").write_bytes(bytes(100_000))
        (disk.path / "other").write_bytes(bytes(100_000))
        disk.fill()
        assert disk.room_bytes == 0
        (disk.path / "other").unlink()
        assert disk.room_bytes > 0
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "third").write_bytes(bytes(100_000))
        assert (disk.path / "file").read_bytes() == bytes(100_000)
        disk.free()
        (disk.path / "third").write_bytes(bytes(100_000))
    assert list((tmp_path / "disk").iterdir()) == []


def test_nothing_stays_mounted_when_the_owner_is_killed(tmp_path: Path) -> None:
    with open_disk(tmp_path / "trial") as trial:
        if trial is None:
            pytest.skip("no file system can be mounted here")
    command = [sys.executable, "-c", OWNER, str(tmp_path / "disk")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        inside = Path(owner.stdout.readline().strip())
        assert sorted(file.name for file in inside.iterdir()) == ["file", "first-page"]
        assert list((tmp_path / "disk").iterdir()) == [], "nobody else sees it"
        owner.kill()
    wait_for(lambda: not inside.exists())  # the holder hears of it
    shutil.rmtree(tmp_path / "disk")


def test_without_the_programs_there_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with open_disk(tmp_path / "disk") as disk:
        assert disk is None
    assert (tmp_path / "disk").is_dir()


def test_a_program_is_killed_frozen_stopped_and_started_again(tmp_path: Path) -> None:
    with open_network("loopback", 1) as network:
        command = network.command("host-1", [sys.executable, "-c", SPEAKS])
    program = Program("p", command, tmp_path / "p.log")
    assert (program.pid, program.ended) == (None, None)
    program.start()
    first = program.pid
    program.start()
    assert program.pid == first, "it runs already"
    program.kill()
    assert (program.pid, program.ended) == (None, -signal.SIGKILL)
    program.start()
    wait_for(lambda: "here" in program.log.read_text())
    program.freeze()
    program.stop()
    assert program.ended == -signal.SIGTERM, "a frozen one hears of it, too"
    assert program.starts == 2
    assert "here" in program.last_words()


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
        wait_for((tmp_path / name).exists)

    seen("whole")
    program.limit_files(0)
    seen("full")
    program.limit_files(None)
    seen("whole")
    (tmp_path / "end").touch()
    assert program.wait(60.0) == 0


def test_a_command_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onesweep.loadtest.faults.process.MODULE", ["-c", "import sys; sys.exit('onesweep: no luck')"])
    with pytest.raises(OnesweepError, match=r"^no luck$"):
        answer_of(["train", "plan"], 60.0)
    monkeypatch.setattr("onesweep.loadtest.faults.process.MODULE", ["-c", "import time; time.sleep(600)"])
    with pytest.raises(OnesweepError, match="`onesweep train plan` has not ended after 0 s"):
        answer_of(["train", "plan"], 0.2)
