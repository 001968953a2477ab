"""The units are understood by systemd, and give away little."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serving.router.topology import read_topology
from stages.wire.channel import DRAIN_S

MAX_EXPOSURE = 2.0
"""On systemd's scale from 0 to 10; 1.4 with systemd 252."""
SECRETS = ("certs/", "tokens")


@pytest.fixture
def units(deploy: Path, tmp_path: Path) -> list[Path]:
    """With a command that exists here, and the template for one host."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    written = []
    for path in sorted((deploy / "systemd").glob("*.service")):
        written.append(tmp_path / path.name.replace("@.", "@paris."))
        written[-1].write_text(path.read_text().replace("/opt/onesweep/bin/onesweep", shutil.which("true") or ""))
    return written


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_systemd_accepts_the_units(units: list[Path]) -> None:
    checked = analyze("verify", "--man=no", *units)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_units_are_sandboxed(units: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    for unit in units:
        printed = analyze("security", "--offline=true", unit).stdout
        (score,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", printed)
        with capsys.disabled():
            print(f"\n{unit.name}: exposure {score}", end="")
        assert float(score) <= MAX_EXPOSURE, printed


def test_secrets_are_passed_as_credentials(deploy: Path) -> None:
    """Else the service's user had to be able to read them where they are."""
    for path in (deploy / "systemd").glob("*.service"):
        lines = path.read_text().splitlines()
        named = [line for line in lines if any(f"/etc/onesweep/{secret}" in line for secret in SECRETS)]
        assert named
        assert all(line.startswith("LoadCredential=") for line in named)


def test_the_example_topology_names_the_example_host(deploy: Path) -> None:
    assert read_topology(deploy / "systemd" / "topology.toml").host("paris")


def test_the_units_have_time_to_complete_their_requests(deploy: Path) -> None:
    for path in (deploy / "systemd").glob("*.service"):
        (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", path.read_text(), re.MULTILINE)
        assert int(seconds) > DRAIN_S, path.name
