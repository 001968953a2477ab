from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages.errors import CheckpointError, ConfigError, InputError, Interrupted
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.grafting.settings import GraftSettings
from trainer.grafting.store import read_record
from trainer.grafting.sweep import write
from trainer.grafting.task import GraftTask
from trainer.grafting.training import Graft, measure_chain, open_graft, train_block
from trainer.run import StepLoss


def weights(graft: Graft, block: int) -> bytes:
    return (graft.out / f"block-{block}.safetensors").read_bytes()


def test_a_block_is_trained_stored_and_read_again(opened: Callable[..., Graft]) -> None:
    losses = train_block(opened(), GraftSettings(1))
    assert losses["before_next_nats"] == losses["valid_next_nats"]
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


def test_the_chain_is_measured_and_writes(opened: Callable[..., Graft]) -> None:
    graft = opened()
    found = measure_chain(graft, 2, 2)
    assert set(found) == {"alone", "alone_scrambled", "chunks", "chunks_scrambled"}
    assert all(len(path) == 3 * 2 + 1 for path in found.values())
    model = graft.model()
    text = write(model, [5, 6, 7], 9, 4, steps=1, seed=3)
    assert len(text) == 9
    assert text == write(model, [5, 6, 7], 9, 4, steps=1, seed=3)
    assert text != write(model, [5, 6, 7], 9, 4, steps=1, seed=4)
    assert len(write(model, [5], 2, 4, steps=1, temperature=0)) == 2


def test_what_cannot_be_grafted_is_refused_with_a_sentence(
    opened: Callable[..., Graft], tmp_path: Path, graft_config: TrainingConfig, corpus: Corpus
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


def test_the_command_trains_and_measures(
    onesweep: Callable[..., object], checkpoint: Path, tmp_path: Path, text_file: Path
) -> None:
    pytest.importorskip("tokenizers")
    config = tmp_path / "graft.toml"
    config.write_text(
        "steps = 1\nvalid_windows = 2\nbfloat16 = false\n"
        "[architecture]\ncontext_bytes = 8\ncode_dim = 8\ncondition_dim = 8\n"
    )
    paths = ("--checkpoint", checkpoint, "--out", tmp_path / "out", "--config", config, "--data", text_file)
    common = (*paths, "--threads", 1)  # more would wait for each other on a busy machine
    done = onesweep("train", "graft", *common, "--rank", 2, "--block", 0, "--json")
    assert json.loads(done.out)["valid_next_nats"] > 0
    done = onesweep("train", "graft", *common, "--rank", 2, "--measure", "--windows", 2, "--euler-steps", 1)
    assert "alone_scrambled" in done.out
    done = onesweep("train", "graft", *common, "--rank", 2, "--write", 1, "--euler-steps", 1)
    assert [line.split()[0] for line in done.out.splitlines()] == ["author", "ar", *["chunks"] * 4]
    assert "at least one prompt" in onesweep("train", "graft", *common, "--rank", 2, "--write", 0).message


def test_a_chain_is_no_model_to_graft(tmp_path: Path, graft_config: TrainingConfig, corpus: Corpus) -> None:
    from trainer.untrained import create_untrained

    create_untrained(tmp_path / "chain", "chain", graft_config.architecture, 0)
    with pytest.raises(InputError, match="a chain already"):
        open_graft(tmp_path / "chain", tmp_path / "out", 2, graft_config, corpus)
