from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.cli.__main__ import main
from stages.checkpoint.checkpoint import load_router_net
from stages.model.partition import equal_probability
from stages.pictures.experts import RouterNet
from stages.pictures.part import in_scale
from tests.trainer.pictures.test_training import CONFIG as CHAIN
from trainer.blocks.run import OptimizerSet, train_step
from trainer.pictures.data import LabelledPictures, PictureSet
from trainer.pictures.experts import RouterTask, balanced_clusters, train_experts
from trainer.pictures.training import train_undivided

CONFIG = replace(CHAIN, experts=2)


def blobs(sizes: dict[int, int]) -> torch.Tensor:
    """Noisy even pictures: so many of each brightness."""
    generator = torch.Generator().manual_seed(0)
    even = torch.cat([torch.full((count, 1, 8, 8), brightness) for brightness, count in sizes.items()])
    return (even + torch.randint(20, even.shape, generator=generator)).to(torch.uint8)


def test_clusters_are_equally_large_and_a_function_of_pictures_and_seed() -> None:
    pixels = blobs({20: 31, 120: 60, 220: 12})
    clusters, assigned = balanced_clusters(pixels, 3, 4, seed=1)
    assert sorted(torch.bincount(assigned).tolist()) == [34, 34, 35]
    again, same = balanced_clusters(pixels, 3, 4, seed=1)
    assert torch.equal(assigned, same)
    assert np.array_equal(clusters.centres, again.centres)
    # whole numbers: no order of additions can give others
    assert np.array_equal(clusters.centres, np.rint(clusters.centres))
    assert np.array_equal(clusters.prices, np.rint(clusters.prices))
    assert (clusters.of(pixels) == assigned).float().mean() > 0.95


def test_the_router_net_learns_the_posterior_that_is_known_in_closed_form() -> None:
    pixels = torch.cat([torch.full((64, 1, 8, 8), value, dtype=torch.uint8) for value in (96, 160)])
    part = LabelledPictures(pixels, torch.zeros(128, dtype=torch.int64))
    pictures = PictureSet("even", ("one", "other"), part, part, part)
    config = replace(CONFIG, steps=150, batch=64, learning_rate=5e-3, matrix_learning_rate=5e-3, sigma_min=0.3)
    clusters, assigned = balanced_clusters(pixels, 2, 4, seed=0)
    torch.manual_seed(0)
    net = RouterNet(config.architecture(pictures, 2))
    partition = equal_probability(1, config.sigma_min, config.sigma_max, overlap=0.0)
    task = RouterTask(net, partition, pictures, config, assigned, clusters)
    optimizers = OptimizerSet(net, config)
    for step in range(config.steps):
        train_step(task, optimizers, config, step)
    rows = net.architecture.to_rows(pixels[[0, 64]])
    generator = torch.Generator().manual_seed(0)
    for sigma in (0.5, 1.0, 2.0):
        z = rows[torch.arange(200) % 2] + sigma * torch.randn(200, *rows.shape[1:], generator=generator)
        probs = (-(z[:, None] - rows).square().sum((2, 3)) / (2 * sigma**2)).softmax(1)
        with torch.inference_mode():
            found = net(in_scale(sigma) * z, torch.full((200,), sigma), torch.zeros(200, dtype=torch.int64)).softmax(-1)
        expected = probs[:, assigned[[0, 64]]]  # columns in the order of the clusters
        assert (found - expected).abs().mean() < 0.08


def test_experts_branch_from_one_net(tmp_path: Path, pictures: PictureSet) -> None:
    train_undivided(CONFIG, pictures, tmp_path / "local", False)
    manifest = train_experts(CONFIG, pictures, tmp_path / "experts", start=tmp_path / "local")
    assert manifest.picture_architecture.parts == 2
    assert len(manifest.partition.boundaries) == 2
    assert load_router_net(tmp_path / "experts").architecture.parts == 2


def test_the_command_trains_experts_and_refuses_in_sentences(
    tmp_path: Path, pictures: PictureSet, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "parts = 2\nlayers = 1\nfeatures = 16\nheads = 2\nsteps = 1\nbatch = 2\n"
    for count in (1, 2, 3, 40):
        (tmp_path / f"{count}.toml").write_text(f"{sizes}experts = {count}\n")
    data = ["--data", str(tmp_path / "pictures.npz"), "--out", str(tmp_path / "out"), "--threads", "1"]
    experts = ["train", "pictures", "experts", *data, "--config"]
    assert main([*experts, str(tmp_path / "2.toml")]) == 0
    assert "3 of 3 parts trained" in capsys.readouterr().out
    for arguments, message in (
        ((3,), "holds a checkpoint of other settings or data"),
        ((1,), "experts must be a whole number from 2 to 64"),
        ((40,), "19 training pictures cannot be shared out to 40 experts"),
        ((2, "--block", "3"), "there are experts 0 to 1, and 2 is their router net"),
    ):
        number, *more = arguments
        assert main([*experts, str(tmp_path / f"{number}.toml"), *more]) in (1, 2)
        assert message in capsys.readouterr().err
