"""A bundle: which models are there, and whether hosts can share them out."""

import shutil
from pathlib import Path

import pytest

from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.inspect import verify
from stages.checkpoint.release_store import read_release_manifest, release_files
from stages.errors import CheckpointError
from stages.host.plan import plan_host


def linked(directory: Path, **folders: Path) -> Path:
    """A bundle made of other bundles' folders."""
    for name, source in folders.items():
        (directory / name).symlink_to(source)
    return directory


def test_a_bundle_has_the_models_of_its_folders(bundles: Path, tmp_path: Path) -> None:
    whole = find_bundle(bundles / "scored")
    assert [path and path.name for path in vars(whole).values()] == ["chain", "ar", "scorer", "local", None]
    some = find_bundle(linked(tmp_path, scorer=bundles / "scored" / "scorer", local=bundles / "own" / "local"))
    assert [*some.models] == ["scorer", "local"]
    # a single checkpoint is the model of its kind
    assert find_bundle(bundles / "scored" / "scorer").models == {"ar": bundles / "scored" / "scorer"}
    assert find_bundle(bundles / "own" / "chain").models == {"chain": bundles / "own" / "chain"}


def test_a_single_checkpoint_may_contain_a_drafter(bundles: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "single"
    shutil.copytree(bundles / "own" / "ar", checkpoint)
    (checkpoint / "local").symlink_to(bundles / "own" / "local")
    assert find_bundle(checkpoint).models == {"ar": checkpoint, "local": checkpoint / "local"}
    contents = read_release_manifest(checkpoint)
    assert contents.name != read_release_manifest(bundles / "own" / "ar").name
    files = release_files(contents.directories, lambda folder, part: True)
    assert {name.partition("/")[0] for name in files} == {"ar", "local"}
    assert [check.model for check in verify(checkpoint)] == ["ar", "ar", "ar", "local"]


def test_models_with_different_numbers_of_parts_are_refused(bundles: Path, tmp_path: Path) -> None:
    mixed = linked(tmp_path, chain=bundles / "own" / "chain", scorer=bundles / "own" / "local")
    with pytest.raises(CheckpointError, match=r"different numbers of parts \(chain 3, scorer 1\)"):
        plan_host(mixed, (0,))
