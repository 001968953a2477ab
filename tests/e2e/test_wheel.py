"""A wheel holds all that a user needs: installed by itself, far from the repository, it runs the demo."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(python: Path, *arguments: str, within_s: float) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(python), *arguments], cwd=python.parent, env=outside, capture_output=True, text=True, timeout=within_s
    )


def test_the_public_names_import_without_torch(python: Path) -> None:
    code = "import sys, onesweep; onesweep.Client, onesweep.Result; print(onesweep.__file__, 'torch' in sys.modules)"
    shown = run(python, "-c", code, within_s=100)
    assert shown.returncode == 0, shown.stderr
    path, has_torch = shown.stdout.split()
    assert not Path(path).is_relative_to(ROOT)
    assert has_torch == "False"


def test_the_demo_runs_with_the_weights_of_the_wheel(python: Path) -> None:
    shown = run(python, "-m", "onesweep", "demo", within_s=600)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "`ar-speculative` writes the text of `ar`: checked" in shown.stdout
    assert "\nauto: " in shown.stdout


def test_the_command_prints_its_version_and_inspects_the_weights(python: Path) -> None:
    shown = run(python, "-m", "onesweep", "--version", within_s=100)
    assert shown.stdout.startswith("onesweep 0."), shown.stderr
    (weights,) = python.parents[1].glob("lib/python3*/site-packages/onesweep/weights/ar")
    shown = run(python, "-m", "onesweep", "inspect", str(weights), within_s=100)
    assert shown.returncode == 0, shown.stderr
    assert "layers" in shown.stdout


def test_the_weights_load_as_modules(python: Path) -> None:
    code = (
        "from pathlib import Path; import onesweep;"
        "chain = onesweep.load_chain(Path(onesweep.__file__).parent / 'weights' / 'chain');"
        "print(len(chain), type(chain[0]).__name__)"
    )
    shown = run(python, "-c", code, within_s=100)
    assert shown.stdout == "3 Block\n", shown.stderr
