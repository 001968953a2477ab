"""Cross-entropies of a trained block or chain on known text."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.architecture import VOCABULARY
from stages.block import Block
from stages.noise import Trajectory, step_sigmas
from stages.partition import NoisePartition
from stages.randomness import Purpose, normals
from trainer.objectives import ChunkLayout

Memory = list[tuple[Tensor, Tensor]]


class PathPoint(NamedTuple):
    """CE of one evaluation on the way from noise to text."""

    sigma: float
    nats: float


def bits(nats: float) -> float:
    """Bits per byte from nats per byte."""
    return nats / math.log(2)


def clean_features(blocks: list[Block], known: Tensor) -> list[tuple[Tensor, Memory]]:
    """Each block's clean features and memory of its layers. known: (batch, positions) int64."""
    out: list[tuple[Tensor, Memory]] = []
    for block in blocks:
        out.append(block.read(known if block.reads_bytes else out[-1][0]))
    return out


def next_byte_nats(logits: Tensor, text: Tensor, skip: int = 1) -> float:
    """CE of next-byte logits (batch, length, 256) on text (batch, length + 1), from byte `skip` (at least 1) on."""
    return _cross_entropy(logits[:, skip - 1 :], text[:, skip:])


def from_noise_path(
    blocks: list[Block],
    memories: list[Memory],
    partition: NoisePartition,
    known: Tensor,
    steps: int,
    *,
    skip: int = 1,
    row: int = 0,
) -> list[PathPoint]:
    """CE of each byte while its slot is denoised from pure noise, given the clean memory: one point an evaluation.

    blocks: neighbours, in order; memories: theirs, of the true prefix or another (see `clean_features`);
    known: (batch, positions) int64; `steps` Euler steps a block, starting at the first block's own sigma_max, and
    one more evaluation at the last block's sigma_min; bytes before `skip` are not counted; `row` is the number of
    known[0] in a larger set, whose noise it takes.

    Every position is a chunk of its own, so no slot sees another (BlockTrain, arXiv 2606.24722). It does not
    describe a one-sweep text, whose positions after the first have no true prefix.
    """
    batch, length = known.shape
    mask = ChunkLayout(length, 1).mask()
    dim = blocks[0].architecture.code_dim
    trajectory = Trajectory(partition.range(blocks[0].index)[0])
    noise = normals(0, Purpose.INITIAL_NOISE, row * length, batch * length, dim).reshape(batch, length, dim)
    initial, estimate = trajectory.sigma_start * noise, torch.zeros(batch, length, dim)
    path = []
    for block, memory in zip(blocks, memories, strict=True):
        sigmas = step_sigmas(*partition.range(block.index), steps)
        for i, sigma in enumerate(sigmas if block is blocks[-1] else sigmas[:-1]):
            z = trajectory.state(initial, estimate, sigma)
            logits = block.denoise(z, estimate, torch.full((1, 1), sigma), memory, 0, mask)
            path.append(PathPoint(sigma, _cross_entropy(logits[:, skip:], known[:, skip:])))
            if i < steps:
                estimate = trajectory.advance(estimate, block.point(logits), sigma, sigmas[i + 1])
    return path


def sigma_max_nats(
    block: Block, memory: Memory, partition: NoisePartition, known: Tensor, *, skip: int = 1, row: int = 0
) -> float:
    """CE of one evaluation at a block's own sigma_max, where z says next to nothing: what the context alone gives."""
    sigma = partition.range(block.index)[0]
    dim = block.architecture.code_dim
    eps = normals(1, Purpose.INITIAL_NOISE, row * known.shape[1], known.numel(), dim)
    z = block.codes[known] + sigma * eps.reshape(*known.shape, -1)
    mask = ChunkLayout(known.shape[1], 1).mask()
    logits = block.denoise(z, torch.zeros_like(z), torch.full((1, 1), sigma), memory, 0, mask)
    return _cross_entropy(logits[:, skip:], known[:, skip:])


def _cross_entropy(logits: Tensor, target: Tensor) -> float:
    return float(F.cross_entropy(logits.float().reshape(-1, VOCABULARY), target.reshape(-1)))
