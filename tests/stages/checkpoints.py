"""The kinds of checkpoints, and their files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stages.checkpoint.checkpoint import load_block, load_stage
from stages.checkpoint.release_store import ReleaseStore, read_release_manifest
from stages.model.block import Block
from stages.model.pipeline import ArStage

Copy = Callable[[str], Path]
ALL = pytest.mark.parametrize("name", ["chain", "ar"])


def load(directory: Path, part: int) -> Block | ArStage:
    return load_stage(directory, part) if directory.name == "ar" else load_block(directory, part)


def part_file(directory: Path, part: int) -> Path:
    (path,) = directory.glob(f"*-{part}-*.safetensors")
    return path


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def put_release(store: ReleaseStore, bundle: Path, blocks: tuple[int, ...] = (0, 1, 2)) -> None:
    """Store what hosts of these blocks need of a bundle."""
    intake = store.begin(read_release_manifest(bundle), lambda folder, part: part in blocks)
    for path in intake.missing:
        intake.write(path, (bundle / path).read_bytes())
    intake.finish()
