from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stages.errors import ResumeError
from trainer.lock import exclusive

HOLD = """
import sys
from pathlib import Path
from trainer.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with (
        exclusive(path),
        pytest.raises(ResumeError, match="already trained here"),
        exclusive(path, "already trained here"),
    ):
        pass
    with exclusive(path, "already trained here"):
        assert path.exists()


def test_without_a_refusal_it_waits(tmp_path: Path) -> None:
    path, order = tmp_path / "run.lock", []

    def wait() -> None:
        with exclusive(path):
            order.append("second")

    with exclusive(path):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ResumeError), exclusive(path, "no"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with exclusive(path, "no"):
        assert path.exists()
