"""`onesweep wan`: what it prints, its exit codes, and sentences instead of tracebacks."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.loadtest.conftest import check_refused

pytestmark = pytest.mark.slow


@pytest.fixture
def wan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onesweep: Run) -> Run:
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path / "state"))
    return partial(onesweep, "wan")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "moon"], "no profile 'moon'; available: consumer, lan, links-150"),
        (["--profile", "lan", "--hosts", "0"], "a lab must have 1 to 64 hosts, not 0"),
    ],
)
def test_a_wrong_option_is_explained(wan: Run, arguments: list[str], message: str) -> None:
    check_refused(wan("up", *arguments), message)


def test_the_network_exists_while_up_runs(needs_lab: None, wan: Run) -> None:
    command = [sys.executable, "-P", "-m", "serving.cli", "wan", "up", "--profile", "three-regions"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        assert "host-3 10.77.0.4" in up.stdout.readline()
        message = "onesweep: a lab is already up (three-regions): stop its `onesweep wan up` first\n"
        assert wan("up", "--profile", "lan") == (1, "", message)
        assert wan("exec", "host-9", "--", "true").code == 2
        assert wan("exec", "host-1").code == 2
        up.send_signal(signal.SIGINT)
    assert up.returncode == 130
    assert wan("exec", "host-1", "--", "true").code == 1, "no lab is up"
