"""Saving a checkpoint never costs what was saved before."""

from pathlib import Path

import pytest

from stages.checkpoint.checkpoint import load_block, save_part, save_parts, update_manifest
from stages.checkpoint.files import replace_file
from stages.errors import CheckpointError
from stages.model.block import Block
from tests.stages.checkpoints import Copy, files, part_file
from tests.stages.conftest import make_ar


def test_saving_needs_a_manifest(tmp_path: Path, block: Block) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            save_part(directory, block)
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            save_parts(directory, make_ar().stages)
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            update_manifest(directory, lambda manifest: manifest)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def fail(path: Path) -> None:
        path.write_text("new, cut off")
        raise failures.pop()

    failures = [KeyboardInterrupt(), OSError(122, "Disk quota exceeded"), OSError(28, "No space left on device")]
    for words in ("No space left on device", "Disk quota exceeded"):
        with pytest.raises(CheckpointError, match=f"file: {words}; .*: free some space$"):
            replace_file(tmp_path / "file", fail)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "file", fail)
    assert files(tmp_path) == {"file": b"old"}


def test_a_manifest_that_cannot_be_written_leaves_no_orphan(directory: Path, block: Block, monkeypatch) -> None:
    before = files(directory)

    def fail(*_: object) -> None:
        raise CheckpointError("cannot save the manifest")

    monkeypatch.setattr("stages.checkpoint.checkpoint.write_manifest", fail)
    with pytest.raises(CheckpointError, match="cannot save the manifest"):
        save_part(directory, block)  # the same weights, so the same file
    assert files(directory) == before
    block.clean_head.bias[0] += 1
    with pytest.raises(CheckpointError, match="cannot save the manifest"):
        save_part(directory, block)
    assert files(directory) == before


def test_files_of_a_killed_process_are_removed(checkpoint: Copy) -> None:
    directory = checkpoint("chain")
    others = files(directory).keys() - {part_file(directory, 0).name}
    of_another = "block-10-0123456789ab.safetensors"
    for name in ("block-0-0123456789ab.safetensors", ".block-0.safetensors.k1ll3d", of_another):
        (directory / name).write_bytes(b"left over")
    save_part(directory, load_block(directory, 0))
    assert files(directory).keys() == {*others, part_file(directory, 0).name, of_another}
