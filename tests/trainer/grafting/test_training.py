import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onesweep.stages.checkpoint.checkpoint import load_chain_part, save_block, update_manifest
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import CheckpointError, ConfigError, InputError, Interrupted
from onesweep.stages.grafting.part import GraftPart
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.blocks.run import StepLoss, train_step
from onesweep.trainer.grafting.batch import next_nats
from onesweep.trainer.grafting.model import GraftModel
from onesweep.trainer.grafting.store import GraftSettings, read_record
from onesweep.trainer.grafting.training import Graft, GraftOptimizers, GraftTask, export_chain, open_graft, train_block
from tests.stages.model.tiny_llama import TINY, write_tiny
from tests.trainer.small import corpus


def weights(graft: Graft, block: int) -> bytes:
    return (graft.out / f"block-{block}.safetensors").read_bytes()


def test_a_block_is_trained_stored_and_read_again(opened: Callable[..., Graft]) -> None:
    graft = opened()
    losses = train_block(graft, GraftSettings(1))
    every_position = next_nats(graft.model(), graft.corpus.valid_batch(2, 12 + 1))
    assert losses["before_next_nats"] == losses["valid_next_nats"] == pytest.approx(every_position, abs=1e-6)
    again = opened()
    assert set(again.record.blocks) == {1}
    model, start = again.model(), again.model(but=1)
    trained, untrained = (list(m.blocks[1].added.parameters()) for m in (model, start))
    assert any(not torch.equal(a, b) for a, b in zip(trained, untrained, strict=True))
    assert train_block(again, GraftSettings(2))["valid_next_nats"] == losses["valid_next_nats"]


def test_a_trained_block_takes_its_place_in_the_pipeline(opened: Callable[..., Graft]) -> None:
    losses = train_block(opened(matrix_learning_rate=1e-2), GraftSettings(0, "block"))
    assert losses["before_next_nats"] != losses["valid_next_nats"]
    after = train_block(opened(), GraftSettings(1))
    assert after["before_next_nats"] == pytest.approx(losses["valid_next_nats"], abs=1e-6)


def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    opened: Callable[..., Graft], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = opened("whole"), opened("parts")
    train_block(whole, GraftSettings(1, "block", "own"))
    loss = GraftTask.loss

    def stopping(self: GraftTask, step: int) -> StepLoss:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, step)

    monkeypatch.setattr(GraftTask, "loss", stopping)
    with pytest.raises(Interrupted, match="step 3"):
        train_block(parts, GraftSettings(1, "block", "own"))
    monkeypatch.setattr(GraftTask, "loss", loss)
    train_block(opened("parts"), GraftSettings(1, "block", "own"))
    assert weights(whole, 1) == weights(parts, 1)


def test_what_cannot_be_grafted_is_refused_with_a_sentence(
    opened: Callable[..., Graft], tmp_path: Path, graft_config: TrainingConfig
) -> None:
    graft = opened()
    with pytest.raises(ConfigError, match="there is no block 3"):
        train_block(graft, GraftSettings(3))
    with pytest.raises(ConfigError, match="trains must be one of"):
        GraftSettings(0, "everything")
    with pytest.raises(CheckpointError, match="other sizes"):
        opened(rank=3)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_graft(tmp_path / "nowhere", tmp_path / "out", 2, graft_config, corpus)
    train_block(graft, GraftSettings(0))
    (graft.out / "block-0.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="fetch it again"):
        opened().model()


@pytest.mark.parametrize("damage", ["{", '{"base": 1}', '{"shape": {"rank": -1}}', "[]"])
def test_a_damaged_record_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "graft.json").write_text(damage)
    with pytest.raises(CheckpointError, match="damaged"):
        read_record(tmp_path)


def test_a_record_that_names_a_file_elsewhere_is_refused(opened: Callable[..., Graft]) -> None:
    out = opened().out
    record = json.loads((out / "graft.json").read_text())
    record["codes"]["file"] = "../codes.safetensors"
    (out / "graft.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="plain name"):
        read_record(out)


def test_the_command_trains(onesweep: Callable[..., object], checkpoint: Path, tmp_path: Path, text_file: Path) -> None:
    config = tmp_path / "graft.toml"
    config.write_text(
        "steps = 1\nvalid_windows = 2\nbfloat16 = false\n"
        "[architecture]\ncontext_length = 8\ncode_dim = 8\ncondition_dim = 8\n"
    )
    paths = ("--checkpoint", checkpoint, "--out", tmp_path / "out", "--config", config, "--data", text_file)
    common = (*paths, "--threads", 1)  # more would wait for each other on a busy machine
    done = onesweep("train", "graft", *common, "--rank", 2, "--block", 0, "--json")
    assert json.loads(done.out)["valid_next_nats"] > 0


def test_a_chain_is_no_model_to_graft(tmp_path: Path, graft_config: TrainingConfig) -> None:
    from onesweep.trainer.blocks.checkpoint_dir import create_untrained

    create_untrained(tmp_path / "chain", "chain", graft_config.architecture, 0)
    with pytest.raises(InputError, match="a chain already"):
        open_graft(tmp_path / "chain", tmp_path / "out", 2, graft_config, corpus)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, graft_config: TrainingConfig) -> Graft:
    """Not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    write_tiny(directory / "pretrained", TINY)

    def opened() -> Graft:
        config = replace(graft_config, steps=1)
        return open_graft(directory / "pretrained", directory / "graft", 2, config, corpus)

    for block in range(3):
        train_block(opened(), GraftSettings(block))
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
    save_block(directory, part, torch.randn(len(manifest.probe_tokens), part.architecture.width))
    changed = read_manifest(directory).parts[1]
    assert recorded is not None
    assert changed is not None
    update_manifest(directory, lambda m: m.with_part(1, replace(changed, probe=recorded.probe)))
    with pytest.raises(CheckpointError, match="denoise_nats on the probe"):
        load_chain_part(directory, 1)


def test_a_chain_that_is_not_whole_is_not_exported(opened: Callable[..., Graft], tmp_path: Path) -> None:
    train_block(opened(steps=1), GraftSettings(1))
    with pytest.raises(InputError, match="block 0, 2 is not trained yet"):
        export_chain(opened(), tmp_path / "chain")
    assert not (tmp_path / "chain").exists()


def test_an_export_that_fails_leaves_nothing_behind(trained: Graft, tmp_path: Path) -> None:
    shutil.copytree(trained.checkpoint, tmp_path / "ar")
    (tmp_path / "ar" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        export_chain(replace(trained, checkpoint=tmp_path / "ar"), tmp_path / "chain")
    assert not [path for path in tmp_path.iterdir() if "chain" in path.name]


@pytest.fixture
def text(model: GraftModel) -> Corpus:
    generator = torch.Generator().manual_seed(0)
    train, valid = torch.randint(200, (2, 400), generator=generator, dtype=torch.int32)
    return Corpus("numbers", train, valid)


def touched(model: GraftModel) -> set[str]:
    """Where gradients are: stage or what is added, and of which block."""
    found = set()
    for block in model.blocks:
        for name, module in (("stage", block.stage), ("added", block.added)):
            if any(p.grad is not None for p in module.parameters()):
                found.add(f"{name} {block.index}")
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GraftSettings(0), {"added 0"}),
        (GraftSettings(1), {"added 1"}),
        (GraftSettings(1, "block", "own"), {"added 1", "stage 1"}),
        (GraftSettings(0, "block", "last"), {"added 0", "stage 0"}),
        (GraftSettings(2, "block"), {"added 2", "stage 2"}),
    ],
)
def test_gradients_stay_within_the_block(
    shaken: GraftModel, text: Corpus, graft_config: TrainingConfig, settings: GraftSettings, expected: set[str]
) -> None:
    task = GraftTask(shaken, text, graft_config, settings)
    task.loss(0).total.backward()
    assert touched(shaken) == expected
    for frozen in (shaken.stages[0].embedding, shaken.stages[-1].head):
        assert all(p.grad is None for p in frozen.parameters())


def test_the_anchor_at_the_end_is_the_next_symbol_loss_of_the_whole(
    shaken: GraftModel, text: Corpus, graft_config: TrainingConfig
) -> None:
    task = GraftTask(shaken, text, graft_config, GraftSettings(0, "block"))
    known = text.batch(graft_config.seed, 0, graft_config.sequences, task.length + 1)
    x = known[:, :-1]
    for stage in shaken.stages:
        x = stage.read(x)
    logits = shaken.stages[-1].next_byte(x)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), known[:, 1:].flatten())
    assert float(task.loss(0).parts["next_nats"]) == pytest.approx(float(expected.detach()), abs=1e-4)


def test_training_slots_keeps_the_pretrained_model_bit_for_bit_and_lowers_their_loss(
    model: GraftModel, text: Corpus, graft_config: TrainingConfig
) -> None:
    config = replace(graft_config, steps=40, learning_rate=2e-2, chunks=(4,))
    known = text.valid_batch(2, 13)[:, :-1]
    before = model.stages[0].read(known)
    task = GraftTask(model, text, config, GraftSettings(0))
    optimizers, lesson = GraftOptimizers(task.module, config), lambda: float(task.loss(3).total.detach())
    first = lesson()
    for step in range(config.steps):
        train_step(task, optimizers, config, 3 if step % 2 else step)
    assert lesson() < first - 0.1
    assert torch.equal(model.stages[0].read(known), before)


def test_training_a_block_moves_it(model: GraftModel, text: Corpus, graft_config: TrainingConfig) -> None:
    known = text.valid_batch(2, 13)[:, :-1]
    before = model.stages[0].read(known)
    task = GraftTask(model, text, graft_config, GraftSettings(0, "block"))
    train_step(task, GraftOptimizers(task.module, graft_config), graft_config, 0)
    assert not torch.equal(model.stages[0].read(known), before)
