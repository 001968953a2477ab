"""Losses that say what a chain is worth: bits per byte, and the from-noise diagnostics."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.architecture import VOCABULARY
from stages.block import Block
from stages.noise import Trajectory, step_sigmas
from stages.partition import NoisePartition
from stages.randomness import Purpose, normals
from trainer.objectives import ChunkLayout, next_byte_loss

Memory = list[tuple[Tensor, Tensor]]


def bits(nats: float) -> float:
    """Bits per byte from nats per byte."""
    return nats / math.log(2)


def clean_features(blocks: list[Block], known: Tensor) -> list[tuple[Tensor, Memory]]:
    """Each block's clean features and memory of its layers. known: (batch, positions) int64."""
    out: list[tuple[Tensor, Memory]] = []
    for block in blocks:
        out.append(block.read(known if block.reads_bytes else out[-1][0]))
    return out


@torch.inference_mode()
def next_byte_nats(block: Block, features: Tensor, text: Tensor) -> float:
    """CE of a block's next-byte head. features: (batch, length, width); text: (batch, length + 1)."""
    return float(next_byte_loss(block.next_byte(features), text))


@torch.inference_mode()
def from_noise_nats(
    blocks: list[Block],
    partition: NoisePartition,
    text: Tensor,
    steps: int,
    *,
    scramble: bool = False,
    first: int = 0,
    seed: int = 0,
) -> float:
    """The papers' metric: CE of each byte after denoising its slot from pure noise, given its *true* prefix.

    Every position is a chunk of its own, so no slot sees another. It does not describe a one-sweep text, whose
    positions after the first have no true prefix. With `scramble`, the clean stream reads another window: if that
    is not much worse, the context is unused. `first` starts the chain at a later block, from pure noise at that
    block's own sigma_max.
    """
    known = text[:, :-1]
    prefix = known.roll(1, dims=0).flip(1) if scramble else known
    batch, length = known.shape
    mask = ChunkLayout(length, 1).mask()
    dim = blocks[0].architecture.code_dim
    trajectory = Trajectory(partition.range(first)[0])
    noise = normals(seed, Purpose.INITIAL_NOISE, 0, batch * length, dim).reshape(batch, length, dim)
    initial, estimate = trajectory.sigma_start * noise, torch.zeros(batch, length, dim)
    logits = torch.empty(0)
    for block, (_, memory) in zip(blocks[first:], clean_features(blocks, prefix)[first:], strict=True):
        sigmas = step_sigmas(*partition.range(block.index), steps)
        last = block.index == len(blocks) - 1
        for i, sigma in enumerate(sigmas if last else sigmas[:-1]):
            z = trajectory.state(initial, estimate, sigma)
            logits = block.denoise(z, estimate, torch.full((1, 1), sigma), memory, 0, mask)
            if i < steps:
                estimate = trajectory.advance(estimate, block.point(logits), sigma, sigmas[i + 1])
    return _cross_entropy(logits[:, 1:], known[:, 1:])


@torch.inference_mode()
def sigma_max_nats(block: Block, features: Tensor | None, partition: NoisePartition, text: Tensor) -> float:
    """CE of one evaluation at a block's own sigma_max, where z says next to nothing: what the context alone gives."""
    known = text[:, :-1]
    _, memory = block.read(known if features is None else features)
    sigma = partition.range(block.index)[0]
    eps = normals(1, Purpose.INITIAL_NOISE, 0, known.numel(), block.architecture.code_dim)
    z = block.codes[known] + sigma * eps.reshape(*known.shape, -1)
    mask = ChunkLayout(known.shape[1], 1).mask()
    logits = block.denoise(z, torch.zeros_like(z), torch.full((1, 1), sigma), memory, 0, mask)
    return _cross_entropy(logits[:, 1:], known[:, 1:])


def _cross_entropy(logits: Tensor, target: Tensor) -> float:
    return float(F.cross_entropy(logits.reshape(-1, VOCABULARY), target.reshape(-1)))
