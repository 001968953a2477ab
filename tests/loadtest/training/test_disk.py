"""The coordinator's disk of its own: full for everybody, and gone when its owner is."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.training.disk import open_disk

OWNER = """
import pathlib, sys
from loadtest.training.disk import open_disk
with open_disk(pathlib.Path(sys.argv[1])) as disk:
    (disk.path / "file").write_bytes(bytes(5000))
    print(disk.path, flush=True)
    sys.stdin.read()
"""


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
    while inside.exists():  # the holder hears of it
        pass
    shutil.rmtree(tmp_path / "disk")


def test_without_the_programs_there_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with open_disk(tmp_path / "disk") as disk:
        assert disk is None
    assert (tmp_path / "disk").is_dir()
