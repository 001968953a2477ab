import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoint.checkpoint import load_ar, load_chain, write_manifest
from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError, Interrupted
from tests.trainer.small import corpus, tiny
from trainer.blocks import train as local
from trainer.blocks.config import NoiseConfig
from trainer.blocks.losses import next_byte_nats
from trainer.blocks.task import BlockTask
from trainer.blocks.train import train_ar, train_blocks

short = replace(tiny, steps=3, architecture=replace(tiny.architecture, layers=1))


def digests(out: Path) -> list[str | None]:
    return [part.sha256 if part else None for part in read_manifest(out).parts]


def test_blocks_are_trained_in_order_and_measured(tmp_path: Path) -> None:
    manifest = train_blocks(short, corpus, tmp_path)
    assert manifest.complete
    assert manifest == read_manifest(tmp_path)
    assert {"block-0", "block-1", "chain"} <= manifest.metrics.keys()
    assert {"from_noise_nats", "from_noise_sigma1_nats"} <= manifest.metrics["chain"].keys()
    assert manifest.data["train_sha256"] == corpus.digest()
    assert [block.index for block in load_chain(tmp_path)] == [0, 1]
    assert not list((tmp_path / "training").glob("*.safetensors"))


def test_blocks_trained_by_separate_commands_are_the_same(tmp_path: Path) -> None:
    train_blocks(short, corpus, tmp_path / "whole")
    for index in (0, 1):
        train_blocks(short, corpus, tmp_path / "parts", only=index)
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    assert read_manifest(tmp_path / "parts").metrics == read_manifest(tmp_path / "whole").metrics


def test_trained_blocks_are_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_blocks(short, corpus, tmp_path)
    before = digests(tmp_path)
    (tmp_path / "training" / "block-0.state.safetensors").write_bytes(b"left by a kill after the block was saved")
    train_blocks(short, corpus, tmp_path)
    assert digests(tmp_path) == before
    assert "block-0: already trained" in capsys.readouterr().out
    assert not list((tmp_path / "training").glob("*.state.safetensors"))


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    train_blocks(short, corpus, tmp_path, only=0)
    before = digests(tmp_path)
    message = "has a checkpoint of other settings or data; choose another --out"
    for other in (replace(short, chunks=(1,)), replace(short, seed=1), replace(short, anchor=0.1)):
        with pytest.raises(CheckpointError, match=message):
            train_blocks(other, corpus, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        train_blocks(short, replace(corpus, train=corpus.train[1:]), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        train_ar(short, corpus, tmp_path, 1)
    assert digests(tmp_path) == before


def test_boundaries_measured_on_another_machine_are_kept(tmp_path: Path) -> None:
    measured = replace(short, noise=NoiseConfig())
    manifest: Any = train_blocks(measured, corpus, tmp_path, only=0)
    assert manifest.partition.kind == "equal_entropy"
    high, middle, low = manifest.partition.boundaries
    moved = replace(manifest.partition, boundaries=(high, middle * (1 + 1e-6), low))
    write_manifest(tmp_path, replace(manifest, partition=moved))
    assert train_blocks(measured, corpus, tmp_path).partition == moved


def test_a_kill_between_measuring_and_saving_loses_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(local, "save_part", killed)
        with pytest.raises(KeyboardInterrupt):
            train_blocks(short, corpus, tmp_path / "killed")
    train_blocks(short, corpus, tmp_path / "killed")
    train_blocks(short, corpus, tmp_path / "whole")
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert read_manifest(tmp_path / "killed").metrics == read_manifest(tmp_path / "whole").metrics


def test_a_stop_at_a_blocks_last_step_does_not_start_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = BlockTask.loss

    def stopping(task: BlockTask, step: int) -> Any:
        if step == short.steps - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(task, step)

    monkeypatch.setattr(BlockTask, "loss", stopping)
    with pytest.raises(Interrupted, match="block-0 is trained and saved; stopped on request"):
        train_blocks(short, corpus, tmp_path)
    assert [digest is not None for digest in digests(tmp_path)] == [True, False]


def test_the_stored_stages_are_the_model_that_was_measured(tmp_path: Path) -> None:
    manifest = train_ar(replace(tiny, steps=3), corpus, tmp_path, 2)
    assert (manifest.architecture.parts, manifest.architecture.layers) == (2, 2)
    text = corpus.valid_batch(short.valid_windows, 33)
    with torch.inference_mode():
        nats = next_byte_nats(load_ar(tmp_path)(text[:, :-1]), text)
    assert nats == pytest.approx(manifest.metrics["ar"]["valid_next_byte_nats"], rel=1e-6)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    config = replace(tiny, steps=60, sequences=8, evaluate_every=1000)
    losses = train_blocks(config, corpus, tmp_path / "chain", only=0).metrics["block-0"]
    assert losses["valid_next_byte_nats"] < 3.5
    assert train_ar(config, corpus, tmp_path / "ar", 1).metrics["ar"]["valid_next_byte_nats"] < 3.5
