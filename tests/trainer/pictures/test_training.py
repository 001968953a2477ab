import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.checkpoint.checkpoint import load_picture_part
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import CheckpointError, ConfigError, Interrupted
from stages.model.partition import equal_probability
from stages.pictures.part import PicturePart
from stages.pictures.trajectory import out_scale, skip_scale
from tests.conftest import Run
from tests.trainer.pictures.test_data import LABELS, write_npz
from trainer.pictures.data import PictureSet, load_pictures
from trainer.pictures.training import PictureConfig, PictureTask, train_picture_blocks, train_undivided

CONFIG = PictureConfig(
    steps=3, patch=4, parts=2, layers=1, features=16, heads=2, condition_dim=16, batch=4, warmup_steps=1, log_every=1
)


def weights(manifest: Manifest) -> list[str]:
    return [part.sha256 for part in manifest.parts if part is not None]


@pytest.fixture
def pictures(tmp_path: Path) -> PictureSet:
    return load_pictures(write_npz(tmp_path / "pictures.npz"))


def test_blocks_trained_separately_are_those_trained_together(tmp_path: Path, pictures: PictureSet) -> None:
    together = train_picture_blocks(CONFIG, pictures, tmp_path / "together")
    for index in reversed(range(2)):
        apart = train_picture_blocks(CONFIG, pictures, tmp_path / "apart", only=index)
        assert apart.complete == (index == 0)
    assert weights(apart) == weights(together)
    assert apart.digest() == together.digest()
    assert sorted(apart.metrics) == ["block-0", "block-1"]
    assert all("valid_denoise_loss" in metrics for metrics in apart.metrics.values())


@pytest.mark.parametrize(
    ("train", "name"), [(partial(train_undivided, large=True), "steps"), (train_picture_blocks, "block-1")]
)
def test_a_resumed_training_gives_the_same_weights(
    tmp_path: Path, pictures: PictureSet, monkeypatch: pytest.MonkeyPatch, train: Callable[..., Manifest], name: str
) -> None:
    config = replace(CONFIG, steps=8)
    whole = train(config, pictures, tmp_path / "whole")
    taken = PictureTask.loss

    def loss(self: PictureTask, step: int) -> object:
        if step == 1 and self.name == name:
            os.kill(os.getpid(), signal.SIGINT)
        return taken(self, step)

    monkeypatch.setattr(PictureTask, "loss", loss)
    with pytest.raises(Interrupted, match=f"{name}.*stopped"):
        train(config, pictures, tmp_path / "stopped")
    monkeypatch.undo()
    assert weights(train(config, pictures, tmp_path / "stopped")) == weights(whole)


def test_blocks_can_start_from_one_net(tmp_path: Path, pictures: PictureSet) -> None:
    local, out = tmp_path / "local", tmp_path / "branched"
    train_undivided(CONFIG, pictures, local, False)
    begin = load_picture_part(local, 0).state_dict()
    still = replace(CONFIG, learning_rate=0.0, matrix_learning_rate=0.0)
    manifest = train_picture_blocks(still, pictures, out, start=local)
    assert manifest.training["start"] == read_manifest(local).digest()
    for index in range(2):
        for name, tensor in load_picture_part(out, index).state_dict().items():
            assert torch.equal(tensor, begin[name])
    with pytest.raises(CheckpointError, match="is not a one-part net of these blocks' shape"):
        train_picture_blocks(replace(CONFIG, layers=2), pictures, tmp_path / "other", start=local)
    assert not (tmp_path / "other").exists(), "the right start may still be given"


def test_the_loss_is_the_weighted_error_of_edm(pictures: PictureSet) -> None:
    """lambda |c_skip z + c_out F - y|^2 in float64 (EDM, arXiv 2206.00364, equations 7 and 8)."""
    architecture = CONFIG.architecture(pictures)
    partition = equal_probability(2, CONFIG.sigma_min, CONFIG.sigma_max, overlap=CONFIG.overlap)
    pictures, seen = replace(pictures, valid=pictures.train), list[np.ndarray]()
    for block in range(2):
        net: Any = PicturePart(architecture, block, "chain")
        torch.nn.init.normal_(net.head.weight)  # else F is 0
        net.register_forward_hook(lambda _, given, f: seen.extend(x.double().numpy() for x in (*given, f)))
        with torch.inference_mode():
            losses = PictureTask("", net, architecture, partition, block, pictures, CONFIG).evaluate()
        scaled, sigma, f = seen[-4], seen[-3][:, None, None], seen[-1]
        y, total = architecture.to_rows(pictures.valid.pixels).double().numpy(), np.hypot(sigma, 0.5)
        z, c_skip, c_out, weight = scaled * total, (0.5 / total) ** 2, sigma / 2 / total, (2 * total / sigma) ** 2
        expected = (weight * (c_skip * z + c_out * f - y) ** 2).mean()
        assert losses["valid_denoise_loss"] == pytest.approx(expected, rel=1e-4)
        assert ((z - y) / sigma).std() == pytest.approx(1, abs=0.1)
        high, low = partition.widened(block)
        assert low <= sigma.min() < sigma.max() <= high
    net, far = PicturePart(architecture, 0, "chain"), replace(pictures, device="meta")
    assert PictureTask("", net, architecture, partition, 0, far, CONFIG).loss(0).total.is_meta
    # At sigma_min the net has next to no say: the picture is z.
    assert (skip_scale(0.002), out_scale(0.002)) == pytest.approx((1, 0.002), rel=1e-4)


def test_training_lowers_the_loss_of_each_block(tmp_path: Path) -> None:
    even = np.where(LABELS == 0, 30, 220).astype(np.uint8)[:, None, None, None] * np.ones((1, 1, 8, 8), np.uint8)
    pictures = load_pictures(write_npz(tmp_path / "even.npz", train_x=even, test_x=even[:4]))
    before = train_picture_blocks(replace(CONFIG, steps=1), pictures, tmp_path / "before").metrics
    after = train_picture_blocks(replace(CONFIG, steps=60, learning_rate=3e-3), pictures, tmp_path / "after").metrics
    for block in ("block-0", "block-1"):
        assert after[block]["valid_denoise_loss"] < before[block]["valid_denoise_loss"]


def test_the_command_trains_and_explains_wrong_options(tmp_path: Path, pictures: PictureSet, onesweep: Run) -> None:
    config = tmp_path / "small.toml"
    config.write_text("parts = 2\nlayers = 1\nfeatures = 16\nheads = 2\nsteps = 1\nbatch = 2\n")
    uneven = tmp_path / "uneven.toml"
    uneven.write_text(config.read_text() + "patch = 3\n")
    data = ["--data", tmp_path / "pictures.npz", "--threads", 1, "--config", config, "--out"]
    there, new = [*data, tmp_path / "out"], [*data, tmp_path / "new"]
    ended = onesweep("train", "pictures", "local", *there)
    assert (ended.code, "1 of 1 parts trained" in ended.out) == (0, True)
    for arguments, message in (
        (["chain", *there], "has a checkpoint of other settings or data"),
        (["chain", *new, "--block", "2"], "block 2 does not exist"),
        (["steps", *new, "--block", "0"], "--block and --start apply only to a chain"),
        (["steps", *new, "--config", uneven], "do not fill patches of 3"),
        (["steps", *new, "--steps", "-1"], "steps must be"),
        (["chain", *new, "--start", tmp_path], "no checkpoint in"),
        (["steps", *new, "--device", "tpu"], "--device must be cpu, cuda or cuda:N, not 'tpu'"),
    ):
        ended = onesweep("train", "pictures", *arguments)
        assert ended.code in (1, 2)
        assert message in ended.message
    for wrong, says in ({"sigma_min": 80.0}, "sigma_min 80"), ({"matrix_optimizer": "moun"}, "one of muon, adamw, not"):
        with pytest.raises(ConfigError, match=says):
            replace(CONFIG, **wrong)
