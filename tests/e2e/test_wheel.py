"""A wheel holds all that a user needs: installed by itself, far from the repository, it runs the demo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the built wheel, and this one's libraries but not its onesweep."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = directory / "source"  # a copy: a build leaves files beside its source that the next one would pack
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "tests"))
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = directory.glob("onesweep-*.whl")
    environment = directory / "environment"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python3*/site-packages")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(packages), str(wheel)], check=True, capture_output=True
    )
    # A .pth file adds the libraries without running the .pth files among them, of which one finds this checkout.
    homes = {Path(spec.origin).parents[1] for name in ("grpc", "torch") if (spec := find_spec(name)) and spec.origin}
    (packages / "libraries.pth").write_text("".join(f"{home}\n" for home in homes))
    return environment / "bin" / "python"


def run(python: Path, *arguments: str, within_s: float) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(python), *arguments], cwd=python.parent, env=outside, capture_output=True, text=True, timeout=within_s
    )


def test_the_public_names_are_there_and_a_client_needs_no_torch(python: Path) -> None:
    code = "import sys, onesweep; onesweep.Client, onesweep.Result; print(onesweep.__file__, 'torch' in sys.modules)"
    shown = run(python, "-c", code, within_s=100)
    assert shown.returncode == 0, shown.stderr
    path, has_torch = shown.stdout.split()
    assert not Path(path).is_relative_to(ROOT)
    assert has_torch == "False"


def test_the_demo_runs_with_the_weights_of_the_wheel(python: Path) -> None:
    shown = run(python, "-m", "onesweep", "demo", within_s=600)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "sweep" in shown.stdout
    assert "ar" in shown.stdout


def test_the_weights_load_as_modules(python: Path) -> None:
    code = (
        "from pathlib import Path; import onesweep;"
        "chain = onesweep.load_chain(Path(onesweep.__file__).parent / 'weights' / 'chain');"
        "print(len(chain), type(chain[0]).__name__)"
    )
    shown = run(python, "-c", code, within_s=100)
    assert shown.stdout == "3 Block\n", shown.stderr
