from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from stages.ar import new_caches
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.block import Block
from stages.codec import Fp32
from stages.partition import NoisePartition
from stages.sweep import BlockWork, Boundary, SweepPlan, run_alone
from trainer.evaluation import bits, clean_features, from_noise_path, next_byte_nats, sigma_max_nats

MakeBlocks = Callable[..., list[Block]]
LENGTH = 9


@pytest.fixture
def known() -> torch.Tensor:
    return torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def memories(blocks: list[Block], known: torch.Tensor) -> list:
    return [memory for _, memory in clean_features(blocks, known)]


def test_bits() -> None:
    assert bits(math.log(2)) == 1


def test_skipped_bytes_are_read_but_not_scored() -> None:
    text = torch.tensor([[5, 6, 7, 8]])
    logits = torch.zeros(1, 3, 256)
    logits[0, 0, 6] = -50.0
    assert next_byte_nats(logits, text, skip=2) == pytest.approx(math.log(256))
    assert next_byte_nats(logits, text) > math.log(256)


@torch.inference_mode()
@pytest.mark.parametrize("context", ["own", "chained"])
def test_from_noise_is_what_a_sweep_does_at_each_position(
    make_blocks: MakeBlocks, partition: NoisePartition, known: torch.Tensor, context: str
) -> None:
    """Against the served code: one slot at a time, after its true prefix, through every block's own KV cache."""
    blocks, steps = make_blocks(context=context), 3
    path = from_noise_path(blocks, memories(blocks, known[:1]), partition, known[:1], steps)
    losses = []
    for position in range(1, LENGTH):
        plan = SweepPlan(seed=0, start=position, slots=1, steps=steps, temperature=0.0)
        before: Boundary | bytes | None = None
        for block in blocks:
            a, caches = block.architecture, new_caches(block.architecture.layers, block.architecture, LENGTH)
            clean = bytes(known[0, :position].tolist())
            work = BlockWork(a, block.index, partition, caches, plan, Fp32(), clean, before)
            before = run_alone(work, backend_named(DEFAULT_BACKEND).block(block))
        losses.append(float(F.cross_entropy(work._logits, known[0, position : position + 1])))
    assert path[-1].nats == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@torch.inference_mode()
def test_the_path_falls_from_sigma_max_to_sigma_min(
    make_blocks: MakeBlocks, partition: NoisePartition, known: torch.Tensor
) -> None:
    blocks = make_blocks()
    path = from_noise_path(blocks, memories(blocks, known), partition, known, 3)
    sigmas = [point.sigma for point in path]
    assert len(path) == 2 * 3 + 1
    assert sigmas == sorted(sigmas, reverse=True)
    assert (sigmas[0], sigmas[3], sigmas[-1]) == partition.boundaries
    alone = from_noise_path(blocks[1:], memories(blocks, known)[1:], partition, known, 3)
    assert [point.sigma for point in alone] == sigmas[3:]


@torch.inference_mode()
def test_the_noise_of_a_row_does_not_depend_on_its_batch(
    make_blocks: MakeBlocks, partition: NoisePartition, known: torch.Tensor
) -> None:
    blocks = make_blocks()
    both = from_noise_path(blocks, memories(blocks, known), partition, known, 2)[-1].nats
    rows = [
        from_noise_path(blocks, memories(blocks, known[i : i + 1]), partition, known[i : i + 1], 2, row=i)[-1].nats
        for i in range(2)
    ]
    assert both == pytest.approx(sum(rows) / 2, rel=1e-5)
    assert rows[1] != from_noise_path(blocks, memories(blocks, known[1:]), partition, known[1:], 2)[-1].nats


@torch.inference_mode()
def test_at_great_noise_only_the_context_counts(
    make_blocks: MakeBlocks, partition: NoisePartition, known: torch.Tensor
) -> None:
    block = make_blocks()[0]
    whole = sigma_max_nats(block, memories([block], known)[0], partition, known)
    rows = [
        sigma_max_nats(block, memories([block], known[i : i + 1])[0], partition, known[i : i + 1], row=i)
        for i in range(2)
    ]
    assert whole == pytest.approx(sum(rows) / 2, rel=1e-5)
    block.noisy_head.weight.data.zero_()
    block.noisy_head.bias.data.zero_()
    far = NoisePartition("uniform", (1000.0, 10.0, 0.1))
    assert sigma_max_nats(block, memories([block], known)[0], far, known) == pytest.approx(math.log(256), abs=0.02)
