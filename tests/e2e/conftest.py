"""A wheel of this tree, installed by itself far from the repository."""

import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "*.egg-info", "tests")


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the built wheel, and this one's libraries but not its onesweep."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = directory / "source"  # a copy: a build leaves files beside its source that the next one would pack
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
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
    command = environment / "bin" / "onesweep"  # with --target, pip writes none that runs
    command.write_text(f'#!/bin/sh\nexec {environment}/bin/python -m onesweep "$@"\n')
    command.chmod(0o755)
    return environment / "bin" / "python"
