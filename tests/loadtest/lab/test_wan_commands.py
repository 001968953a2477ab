"""`onesweep wan`: what it prints, its exit codes, and sentences instead of tracebacks."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.cli.__main__ import main

pytestmark = pytest.mark.slow


@pytest.fixture
def wan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`wan("up", ...)`: exit code and everything that was printed."""
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path / "state"))

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["wan", *arguments])
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "moon"], "no profile 'moon'; available: consumer, lan, links-150"),
        (["--profile", "lan", "--hosts", "0"], "a lab must have 1 to 64 hosts, not 0"),
    ],
)
def test_a_wrong_option_is_explained(wan: Callable[..., tuple[int, str]], arguments: list[str], message: str) -> None:
    code, shown = wan("up", *arguments)
    assert (code, shown.count("\n")) == (2, 1)
    assert message in shown


def test_the_network_exists_while_up_runs(needs_lab: None, wan: Callable[..., tuple[int, str]]) -> None:
    command = [sys.executable, "-P", "-m", "serving.cli", "wan", "up", "--profile", "three-regions"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        assert "host-3 10.77.0.4" in up.stdout.readline()
        code, shown = wan("up", "--profile", "lan")
        message = "onesweep: a lab is already up (three-regions): stop its `onesweep wan up` first\n"
        assert (code, shown) == (1, message)
        assert wan("exec", "host-9", "--", "true")[0] == 2
        assert wan("exec", "host-1")[0] == 2
        up.send_signal(signal.SIGINT)
    assert up.returncode == 130
    assert wan("exec", "host-1", "--", "true")[0] == 1, "no lab is up"
