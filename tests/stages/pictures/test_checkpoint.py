"""Checkpoints that draw: what is saved is what is loaded, and what is wrong is refused."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import halve, load_picture_part
from stages.checkpoint.inspect import describe, record, verify
from stages.checkpoint.manifest import MANIFEST_NAME, read_manifest
from stages.checkpoint.release_store import read_release_manifest, release_files
from stages.errors import CheckpointError
from stages.host.plan import plan_host
from tests.stages.checkpoints import part_file
from tests.stages.conftest import edit_manifest
from tests.stages.pictures.tiny import FOLDERS, TINY, tiny_part, tiny_partition, tiny_picture_bundle


@pytest.fixture
def copied(drawing: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(drawing, tmp_path / "bundle"))


@pytest.mark.parametrize("kind", ["chain", "steps"])
def test_a_loaded_part_is_the_saved_one(drawing: Path, kind: Any) -> None:
    manifest = read_manifest(drawing / kind)
    assert manifest.picture_architecture == TINY
    assert manifest.partition == tiny_partition(kind)
    for index in range(TINY.parts):
        loaded, saved = load_picture_part(drawing / kind, index), tiny_part(index, kind)
        assert loaded.kind == kind
        assert all(torch.equal(x, saved.state_dict()[name]) for name, x in loaded.state_dict().items())


def test_swapped_blocks_are_refused(copied: Path) -> None:
    def swap(manifest: dict[str, Any]) -> None:
        first, second = manifest["parts"][:2]
        manifest["parts"][:2] = [second, first]

    for folder in ("chain", "steps"):
        edit_manifest(copied / folder, swap)
        for part in (0, 1):
            with pytest.raises(CheckpointError):
                load_picture_part(copied / folder, part)
    with pytest.raises(CheckpointError, match=r"part 0 is refused: picture_relative_error on the probe is \d"):
        load_picture_part(copied / "chain", 0)


@pytest.mark.parametrize("change", [{"classes": TINY.classes[:2]}, {"patch": 4}, {"features": 64}, {"channels": 3}])
def test_a_block_of_another_architecture_is_refused(copied: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    """Its file is whole, and its digest right."""
    other = tiny_picture_bundle(tmp_path / "other", ("chain",), replace(TINY, **change)) / "chain"
    part = json.loads((other / MANIFEST_NAME).read_text())["parts"][1]
    shutil.copy(other / part["file"], copied / "chain")
    edit_manifest(copied / "chain", lambda manifest: manifest["parts"].__setitem__(1, part))
    with pytest.raises(CheckpointError, match="shape"):
        load_picture_part(copied / "chain", 1)


def test_a_16_bit_copy_is_another_checkpoint_that_loads(drawing: Path, tmp_path: Path) -> None:
    for folder in ("chain", "steps"):
        manifest = halve(drawing / folder, tmp_path / folder)
        assert manifest.digest() != read_manifest(drawing / folder).digest()
        assert part_file(tmp_path / folder, 0).stat().st_size < 0.6 * part_file(drawing / folder, 0).stat().st_size
    assert all(check.ok for check in verify(tmp_path))


def test_a_bundle_of_pictures_is_inspected_and_released_like_one_of_text(drawing: Path) -> None:
    assert find_bundle(drawing).models.keys() == set(FOLDERS)
    assert json.loads(json.dumps(record(drawing)))["steps"]["architecture"]["classes"] == list(TINY.classes)
    assert "classes zero one two" in describe(drawing)
    assert [check.model for check in verify(drawing) if check.ok] == ["chain"] * 3 + ["local"] + ["steps"] * 3
    contents = read_release_manifest(drawing)
    files = release_files(contents.directories, lambda folder, part: folder != "local" and part == 1)
    assert sorted(name.partition("/")[0] for name in files) == ["chain", "steps"]


def test_a_bundle_of_pictures_and_text_is_refused(drawing: Path, bundles: Path, tmp_path: Path) -> None:
    (tmp_path / "chain").symlink_to(bundles / "own" / "chain")
    (tmp_path / "steps").symlink_to(drawing / "steps")
    with pytest.raises(CheckpointError, match="share a directory"):
        plan_host(tmp_path, (0,))


BAD: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda m: m.update(kind="ar"), "kind 'ar' is for text models"),
    (lambda m: m["architecture"].update(family="film"), "damaged"),
    (lambda m: m["architecture"].update(patch=3), "do not fill patches of 3"),
    (lambda m: m["architecture"].update(height=1 << 20), "height"),
    (lambda m: m["architecture"].update(heads=5), "must be a multiple of heads 5"),
    (lambda m: m["architecture"].update(classes=[]), "needs 1 to 10000 classes"),
    (lambda m: m["architecture"].update(classes=["a", "a"]), "with different names"),
    (lambda m: m["architecture"].update(classes=["a\n"]), "printable name"),
    (lambda m: m["architecture"].update(mean=2.0), "mean must be a number from 0 to 1"),
    (lambda m: m["architecture"].update(deviation=0.0), "deviation must be a number from 0.001 to 1"),
    (lambda m: m["architecture"].pop("classes"), "classes"),
    (lambda m: m["architecture"].update(width=8.5), "width"),
    (lambda m: m["partition"].update(boundaries=[80.0, 0.002]), "2 boundaries for 3 noise ranges"),
    (lambda m: m["partition"].update(boundaries=[80.0, 0.1, 0.5, 0.002]), "damaged"),
    (lambda m: m["partition"]["prior"].update(mean=10**400), "damaged"),
    (lambda m: m.update(probe_tolerance=0), "probe tolerance"),
    (lambda m: m["parts"].pop(), "2 parts listed, but the architecture has 3"),
    (lambda m: m["parts"][0].update(file="../x.safetensors"), "plain .safetensors name"),
    (lambda m: m["parts"][0]["probe"].update(picture_relative_error=math.inf), "damaged"),
]


BAD_STEPS = [
    (lambda m: m["parts"].pop(), "2 parts listed, but the architecture has 3"),
    (lambda m: m["partition"].update(boundaries=[80.0, 1.0, 0.002]), "3 boundaries for 1 noise ranges"),
    (lambda m: m["partition"].update(boundaries=[80.0]), "boundaries must be finite"),
]


@pytest.mark.parametrize(("folder", "bad"), [*(("chain", bad) for bad in BAD), *(("steps", bad) for bad in BAD_STEPS)])
def test_a_manifest_with_a_wrong_value_is_refused(copied: Path, folder: str, bad: tuple[Any, str]) -> None:
    edit_manifest(copied / folder, bad[0])
    with pytest.raises(CheckpointError, match=bad[1]):
        read_manifest(copied / folder)
