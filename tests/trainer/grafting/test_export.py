from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.checkpoint import load_chain_part, save_graft, update_manifest
from stages.errors import CheckpointError, InputError
from stages.grafting.part import GraftPart
from stages.manifest import read_manifest
from trainer.grafting.export import export_chain
from trainer.grafting.settings import GraftSettings
from trainer.grafting.training import Graft, train_block


@pytest.fixture
def trained(opened: Callable[..., Graft]) -> Graft:
    for block in range(3):
        train_block(opened(steps=1), GraftSettings(block))
    return opened()


def test_what_is_exported_is_what_was_trained(trained: Graft, tmp_path: Path) -> None:
    directory = tmp_path / "chain"
    manifest, model = export_chain(trained, directory), trained.model()
    assert manifest.complete
    assert manifest.partition == model.partition
    for index, block in enumerate(model.blocks):
        part = load_chain_part(directory, index)
        assert isinstance(part, GraftPart)
        theirs, ours = part.block.state_dict(), block.state_dict()
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
        assert torch.equal(part.head.weight, model.head.weight)
        assert torch.equal(part.codes, model.head.codes)
    for name in trained.manifest.files:
        assert (directory / name).read_bytes() == (trained.checkpoint / name).read_bytes()
    with pytest.raises(InputError, match="is there already"):
        export_chain(trained, directory)


def test_weights_that_do_not_mean_what_the_manifest_says_are_refused(trained: Graft, tmp_path: Path) -> None:
    """What only slots use is behind the gate, too."""
    directory = tmp_path / "chain"
    manifest = export_chain(trained, directory)
    part = load_chain_part(directory, 1)
    assert isinstance(part, GraftPart)
    recorded = manifest.parts[1]
    part.block.added.way_out.lens.weight.add_(1)
    save_graft(directory, part, torch.randn(len(manifest.probe_tokens), part.architecture.width))
    changed = read_manifest(directory).parts[1]
    assert recorded is not None
    assert changed is not None
    update_manifest(directory, lambda m: m.with_part(1, replace(changed, probe=recorded.probe)))
    with pytest.raises(CheckpointError, match="denoise_nats on the probe text"):
        load_chain_part(directory, 1)


def test_a_chain_that_is_not_whole_is_not_exported(opened: Callable[..., Graft], tmp_path: Path) -> None:
    train_block(opened(steps=1), GraftSettings(1))
    with pytest.raises(InputError, match="block 0, 2 is not trained yet"):
        export_chain(opened(), tmp_path / "chain")
    assert not (tmp_path / "chain").exists()


def test_an_export_that_fails_leaves_nothing_behind(trained: Graft, tmp_path: Path) -> None:
    (trained.checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        export_chain(trained, tmp_path / "chain")
    assert not [path for path in tmp_path.iterdir() if "chain" in path.name]
