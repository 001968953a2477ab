"""Programs that are killed, frozen and started again."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.faults.process import Program
from loadtest.workload.testbed import open_network

pytestmark = pytest.mark.slow

SPEAKS = "import time; print('here', flush=True); time.sleep(600)"
PATIENCE_S = 100.0


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_is_killed_frozen_and_started_again(tmp_path: Path) -> None:
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
    program.signal(signal.SIGSTOP)
    program.signal(signal.SIGCONT)
    program.kill()
    assert program.starts == 2
    assert "here" in program.last_words()
