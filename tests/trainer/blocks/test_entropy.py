from itertools import pairwise

import numpy as np
import pytest
import torch

from stages.model.randomness import Codes
from tests.trainer.small import corpus
from trainer.blocks import checkpoint_dir as entropy
from trainer.blocks.checkpoint_dir import entropy_curve, make_partition
from trainer.blocks.config import NoiseConfig


def unigram_nats(text: torch.Tensor) -> float:
    share = torch.bincount(text.long()).double() / len(text)
    return float(-(share[share > 0] * share[share > 0].log()).sum())


def test_the_curve_rises_from_zero_to_the_entropy_of_a_byte() -> None:
    sigmas, nats = entropy_curve(Codes(0, 32), corpus.train, 0.02, 50.0)
    assert all(low < high for low, high in pairwise(sigmas))
    assert all(high > low - 1e-3 for low, high in pairwise(nats))
    assert nats[0] < 1e-6
    assert nats[-1] == pytest.approx(unigram_nats(corpus.train), abs=0.1)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "SAMPLES", 512)


@pytest.mark.usefixtures("few_samples")
def test_blocks_share_the_entropy_equally() -> None:
    noise, codes = NoiseConfig(), Codes(0, 32)
    partition = make_partition(noise, 4, codes, corpus.train)
    assert (partition.sigma_max, partition.sigma_min) == (noise.sigma_max, noise.sigma_min)
    sigmas, nats = entropy_curve(codes, corpus.train, noise.sigma_min, noise.sigma_max)
    curve = np.interp(np.log(partition.boundaries), np.log(sigmas), nats)
    falls = [high - low for high, low in pairwise(curve)]
    assert max(falls) - min(falls) < 0.02 * sum(falls)


@pytest.mark.usefixtures("few_samples")
def test_measured_boundaries_do_not_depend_on_threads() -> None:
    made = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        made.append(make_partition(NoiseConfig(), 3, Codes(0, 32), corpus.train))
    assert made[0] == made[1]


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("kind", ["equal_probability", "equal_entropy"])
def test_every_kind_of_partition_covers_the_given_range(kind: str) -> None:
    partition = make_partition(NoiseConfig(partition=kind, overlap=0.1), 3, Codes(0, 16), corpus.train)
    assert partition.kind == kind
    assert len(partition.boundaries) == 4
    assert (partition.boundaries[0], partition.boundaries[-1], partition.overlap) == (10.0, 0.15, 0.1)
