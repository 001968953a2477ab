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

from loadtest.faults.process import Program, open_disk
from loadtest.workload.testbed import open_network

pytestmark = pytest.mark.slow

SPEAKS = "import time; print('here', flush=True); time.sleep(600)"
PATIENCE_S = 100.0
OWNER = """
import pathlib, sys
from loadtest.faults.process import open_disk
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
