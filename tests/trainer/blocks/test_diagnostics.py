from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from stages.backends import Backend
from stages.host.work.sweep import BlockWork, SweepPlan
from stages.model.codec import Fp32
from stages.model.partition import NoisePartition
from stages.model.pipeline import new_caches
from stages.model.vocabulary import BYTES
from tests.e2e.one_process import run_unbatched
from tests.trainer.small import corpus, make_blocks, partition, tiny
from trainer.blocks.losses import chain_diagnostics, from_noise_path
from trainer.blocks.task import BlockTask

LENGTH = 9


@pytest.fixture
def text() -> torch.Tensor:
    return corpus.valid_batch(6, 17)


@pytest.fixture
def known() -> torch.Tensor:
    return torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_diagnostics_are_the_losses_of_the_path(text: torch.Tensor) -> None:
    blocks = make_blocks()
    path = from_noise_path(blocks, partition, text[:, :-1], 3)
    above = [i for i, (sigma, _) in enumerate(path) if sigma >= 1][-1]
    assert 0 < above < len(path) - 1
    expected = {"from_noise_nats": path[-1][1], "from_noise_sigma1_nats": path[above][1]}
    assert chain_diagnostics(blocks, partition, text, 3) == pytest.approx(expected, rel=1e-4)


def test_both_readings_are_equal_if_the_range_ends_at_one(text: torch.Tensor) -> None:
    losses = chain_diagnostics(make_blocks(), NoisePartition("uniform", (10.0, 3.0, 1.0)), text, 2)
    assert losses["from_noise_sigma1_nats"] == losses["from_noise_nats"]
    low = chain_diagnostics(make_blocks(), NoisePartition("uniform", (0.9, 0.5, 0.2)), text, 2)
    assert "from_noise_sigma1_nats" not in low


def test_a_trained_chain_uses_its_context() -> None:
    """On text of words the prefix helps; without attention to it, order makes no difference."""
    partition = NoisePartition("uniform", (10.0, 3.0, 1.0))
    config = replace(tiny, chunks=(1,), sequences=8)
    block = make_blocks(layers=1)[0]
    for parameter in block.parameters():
        parameter.data *= 0.3
    task = BlockTask(block, partition, corpus, config)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    for step in range(150):
        optimizer.zero_grad()
        task.loss(step).total.backward()
        optimizer.step()
    text = corpus.valid_batch(16, 33)
    losses = chain_diagnostics([block], partition, text, 2)
    for layer in block.layers:
        layer.attention_out.weight.data.zero_()
    blind = chain_diagnostics([block], partition, text, 2)
    assert losses["from_noise_nats"] < blind["from_noise_nats"] - 0.3


@torch.inference_mode()
def test_the_loss_from_noise_is_that_of_served_sweeps(known: torch.Tensor) -> None:
    """Against the served code: one slot at a time, after its true prefix, through every block's own KV cache."""
    blocks, steps = make_blocks(), 3
    path = from_noise_path(blocks, partition, known[:1], steps)
    losses = []
    for position in range(1, LENGTH):
        plan = SweepPlan(seed=0, start=position, slots=1, steps=steps, temperature=0.0)
        before: bytes | None = None
        for block in blocks:
            a, caches = block.architecture, new_caches(block.architecture.layers, block.architecture, LENGTH)
            clean = bytes(known[0, :position].tolist())
            work = BlockWork(a, block.index, partition, caches, plan, Fp32(), BYTES.decode(clean), before)
            before = run_unbatched(work, Backend().block(block))
        losses.append(float(F.cross_entropy(work._logits, known[0, position : position + 1])))
    assert path[-1][1] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@torch.inference_mode()
def test_the_path_falls_to_sigma_min_and_each_row_has_its_own_noise(known: torch.Tensor) -> None:
    blocks = make_blocks()
    sigmas = [sigma for sigma, _ in from_noise_path(blocks, partition, known, 3)]
    assert len(sigmas) == 2 * 3 + 1
    assert sigmas == sorted(sigmas, reverse=True)
    assert (sigmas[0], sigmas[3], sigmas[-1]) == partition.boundaries
    alone = from_noise_path(blocks[1:], partition, known, 3)
    assert [sigma for sigma, _ in alone] == sigmas[3:]
    both = from_noise_path(blocks, partition, known, 2)[-1][1]
    rows = [from_noise_path(blocks, partition, known[i : i + 1], 2, row=i)[-1][1] for i in range(2)]
    assert both == pytest.approx(sum(rows) / 2, rel=1e-5)
    assert rows[1] != from_noise_path(blocks, partition, known[1:], 2)[-1][1]
