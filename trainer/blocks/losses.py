"""Losses: denoising with a clean anchor for one block, next byte for the AR model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.model.block import Block
from stages.model.partition import NoisePartition

MASKED = -1e9  # finite: -inf in masks breaks some backends


@dataclass(frozen=True)
class ChunkLayout:
    """A window of `length` positions cut into chunks of `chunk`, the first one shortened by `offset`."""

    # Training draws the offset at random: without it a chunk of the whole window never has a prefix, and `sweep` writes
    # exactly that, one chunk after a prefix.

    length: int
    chunk: int
    offset: int = 0

    def indices(self) -> Tensor:
        """The chunk that each position belongs to: (length,) int64."""
        return (torch.arange(self.length) + self.offset) // self.chunk

    def mask(self) -> Tensor:
        """Additive mask (length, 2 * length) of a noisy slot over [clean, noisy] positions."""
        # A slot sees the clean positions of earlier chunks and the slots of its own chunk (BD3-LM, arXiv 2503.09573).
        index = self.indices()
        clean = index[None, :] < index[:, None]
        noisy = index[None, :] == index[:, None]
        return torch.where(torch.cat([clean, noisy], dim=1), 0.0, MASKED)


@dataclass(frozen=True)
class Corruption:
    """The noise of one training step: sigma (batch, positions), eps (batch, positions, code_dim)."""

    sigma: Tensor
    eps: Tensor

    @classmethod
    def draw(
        cls, block: Block, partition: NoisePartition, layout: ChunkLayout, batch: int, generator: torch.Generator
    ) -> Corruption:
        """One noise level for each chunk of each sequence, from the block's widened range."""
        index = layout.indices()
        uniform = torch.rand(batch, int(index[-1]) + 1, generator=generator)
        sigma = partition.sample(block.index, uniform)[:, index]
        eps = torch.randn(batch, layout.length, block.architecture.code_dim, generator=generator)
        return cls(sigma.to(block.codes.device), eps.to(block.codes.device))


@dataclass(frozen=True)
class BlockLoss:
    """Mean cross-entropies in nats a byte; `total` carries the gradient."""

    total: Tensor
    denoise: Tensor
    next_byte: Tensor


def block_loss(
    block: Block,
    text: Tensor,
    layout: ChunkLayout,
    corruption: Corruption,
    *,
    self_condition: bool,
    anchor: float,
) -> BlockLoss:
    """CE of the noisy slots + `anchor` * CE of the clean next byte.

    text: (batch, length + 1) int64. The estimate input is the block's own first guess with `self_condition`, else zero.
    """
    known, following = text[:, :-1], text[:, 1:]
    clean, memory = block.read(known)
    z = block.codes[known] + corruption.sigma[..., None] * corruption.eps
    mask = layout.mask().to(z.device)
    estimate = torch.zeros_like(z)
    if self_condition:
        # No gradient: when served, the estimate is an input from an earlier evaluation.
        with torch.no_grad():
            estimate = block.point(block.denoise(z, estimate, corruption.sigma, memory, 0, mask))
    logits = block.denoise(z, estimate, corruption.sigma, memory, 0, mask)
    denoise = F.cross_entropy(logits.flatten(0, -2), known.reshape(-1))
    next_byte = F.cross_entropy(block.next_byte(clean).float().flatten(0, -2), following.reshape(-1))
    return BlockLoss(denoise + anchor * next_byte, denoise.detach(), next_byte.detach())


def next_byte_loss(logits: Tensor, text: Tensor) -> Tensor:
    """Mean next-byte CE in nats. logits: (batch, length, vocabulary) for text[:, :-1]; text: (batch, length + 1)."""
    return F.cross_entropy(logits.float().flatten(0, -2), text[:, 1:].reshape(-1))
