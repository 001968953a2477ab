from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import until

SCRIPT = """
import subprocess
from tests import forking
forking.install()
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(left.pid, flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the reaper needs Linux")
def test_what_a_killed_test_process_started_is_killed() -> None:
    command = [sys.executable, "-c", SCRIPT]
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        line = Path("/proc") / tests.stdout.readline().strip() / "cmdline"
        until(lambda: line.read_bytes().startswith(b"sleep"), 60)  # it is a copy of its parent first
        tests.kill()
    until(lambda: not line.exists() or not line.read_bytes(), 60)  # gone, or a zombie
