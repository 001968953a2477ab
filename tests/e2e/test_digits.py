"""A chain is trained block by block on handwritten digits, served by three hosts, and what it draws can be read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from loadtest.quality.pictures import load_judge
from serving.cli.__main__ import main
from serving.cli.deployment import temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import local_topology
from trainer.pictures.data import load_pictures

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).with_name("digits")
SETTINGS = """
patch = 2
features = 48
batch = 32
steps = 700
learning_rate = 0.004
matrix_learning_rate = 0.004
"""


def test_a_classifier_recognizes_digits_drawn_by_a_trained_chain(tmp_path: Path) -> None:
    data, chain = DIGITS / "digits.npz", tmp_path / "bundle" / "chain"
    config = tmp_path / "digits.toml"
    config.write_text(SETTINGS)
    train = ["train", "pictures", "chain", "--data", str(data), "--out", str(chain), "--config", str(config)]
    for block in (2, 0, 1):  # apart, in any order
        assert main([*train, "--threads", "1", "--block", str(block)]) == 0
    judge, test = load_judge(DIGITS / "judge.safetensors")[0], load_pictures(data).test
    assert (judge.classify(test.pixels)[1] == test.labels.numpy()).mean() > 0.93
    topology = local_topology(3, 3, chain.parent, free_port_block(4) + 1)
    with temporary_deployment(topology, chain.parent) as running, Client(running.topology.router) as client:
        drawn = client.draw([str(digit) for digit in range(10)], pictures=20, seed=1, levels=6)
    assert (drawn.sweeps, drawn.hops) == (1, 4)
    read = judge.classify(torch.from_numpy(drawn.pixels.copy()))[1]
    assert (read == np.repeat(np.arange(10), 20)).mean() >= 0.9
