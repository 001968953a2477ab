"""A tiny model and a tiny text."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.small import TEXT

SETTINGS = """
steps = 12
sequences = 2
warmup_steps = 2
log_every = 1
evaluate_every = 25
valid_windows = 4
save_every_s = {save_every_s}
chunks = [1, 4, 0]
architecture = {{ parts = 2, layers = 1, width = 16, heads = 2, context_length = 32, code_dim = 8, condition_dim = 8 }}
[noise]
partition = "equal_probability"
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of `corpus`."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A TOML file of a tiny run that saves its state so often."""
    directory = tmp_path_factory.mktemp("settings")

    def write(save_every_s: float = 60.0) -> Path:
        path = directory / f"save-{save_every_s}.toml"
        path.write_text(SETTINGS.format(save_every_s=save_every_s))
        return path

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk("128k")`: a real file system of that size."""
    path = tmp_path / "disk"

    def mount(size: str) -> Path:
        path.mkdir()
        if shutil.which("mount") is None or os.geteuid() != 0:
            pytest.skip("only root can mount a small file system")
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
        mounted = subprocess.run(command, capture_output=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", path], check=True)
