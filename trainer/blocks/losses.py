"""Losses: denoising with a clean anchor for one block, next byte for the AR model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.samplers import Ode, step_sigmas

MASKED = -1e9  # finite, because -inf in masks breaks some backends


@dataclass(frozen=True)
class ChunkLayout:
    """A window of `length` positions cut into chunks of `chunk`, the first one shortened by `offset`."""

    # Training draws the offset at random: otherwise a chunk of the whole window never has a prefix, and `sweep`
    # generates exactly that, one chunk after a prefix.

    length: int
    chunk: int
    offset: int = 0

    def indices(self) -> Tensor:
        """The chunk of each position: (length,) int64."""
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
    ) -> Self:
        """Draw one noise level for each chunk of each sequence, from the block's widened range."""
        index = layout.indices()
        uniform = torch.rand(batch, int(index[-1]) + 1, generator=generator)
        sigma = partition.sample(block.index, uniform)[:, index]
        eps = torch.randn(batch, layout.length, block.architecture.code_dim, generator=generator)
        return cls(sigma.to(block.codes.device), eps.to(block.codes.device))


def block_loss(
    block: Block, text: Tensor, layout: ChunkLayout, corruption: Corruption, *, self_condition: bool
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropies in nats per byte: of the noisy slots, and of the clean next byte.

    text: (batch, length + 1) int64. The estimate is the block's own first guess with `self_condition`, else zero.
    """
    known = text[:, :-1]
    clean, memory = block.read(known)
    z = block.codes[known] + corruption.sigma[..., None] * corruption.eps
    mask = layout.mask().to(z.device)
    estimate = torch.zeros_like(z)
    if self_condition:
        # No gradient: in serving, the estimate is an input from an earlier evaluation.
        with torch.no_grad():
            estimate = block.point(block.denoise(z, estimate, corruption.sigma, memory, 0, mask))
    logits = block.denoise(z, estimate, corruption.sigma, memory, 0, mask)
    denoise = F.cross_entropy(logits.flatten(0, -2), known.reshape(-1))
    return denoise, next_byte_loss(block.next_byte(clean), text)


def next_byte_loss(logits: Tensor, text: Tensor) -> Tensor:
    """Mean next-byte CE in nats. logits: (batch, length, vocabulary) for text[:, :-1]; text: (batch, length + 1)."""
    return F.cross_entropy(logits.float().flatten(0, -2), text[:, 1:].reshape(-1))


ROWS = 4  # windows evaluated at a time
PAPERS_SIGMA_MIN = 1.0  # end of the noise range of BlockTrain (arXiv 2606.24722)


def next_byte_nats(logits: Tensor, text: Tensor, skip: int = 1) -> float:
    """CE of next-token logits (batch, length, vocabulary) on text (batch, length + 1), from `skip` (1 or more) on."""
    return float(next_byte_loss(logits[:, skip - 1 :], text[:, skip - 1 :]))


def from_noise_path(
    blocks: Sequence[Block], partition: NoisePartition, known: Tensor, steps: int, *, skip: int = 1, row: int = 0
) -> list[tuple[float, float]]:
    """(sigma, nats) of each evaluation, as every byte's slot is denoised from pure noise given its true prefix.

    blocks: neighbours, in order; known: (batch, positions) int64; `steps` Euler steps per block, from the first block's
    own sigma_max, and one more evaluation at the last block's sigma_min; bytes before `skip` do not count; `row` is the
    number of known[0] in a larger set, whose noise it gets.
    """
    # Every position is its own chunk, so no slot sees another (BlockTrain, arXiv 2606.24722). This does not describe a
    # one-sweep text, whose positions after the first have no true prefix.
    (batch, length), dim = known.shape, blocks[0].architecture.code_dim
    ranges = [partition.range(block.index) for block in blocks]
    memories = [block.read(known)[1] for block in blocks]
    mask = ChunkLayout(length, 1).mask().to(known.device)
    spans = [(place, *step) for place, span in enumerate(ranges) for step in pairwise(step_sigmas(*span, steps))]
    ode = Ode(0, row * length, batch * length, dim, ranges[0][0], 1.0)
    estimate, points = torch.zeros(batch * length, dim), []
    for i, (place, sigma, sigma_next) in enumerate([*spans, (len(ranges) - 1, ranges[-1][1], None)]):
        block = blocks[place]
        z, before = (x.view(batch, length, dim).to(known.device) for x in (ode.state(estimate, sigma, i), estimate))
        level = torch.full((1, 1), sigma, device=known.device)
        logits = block.denoise(z, before, level, memories[place], 0, mask).float()
        nats = logits.log_softmax(-1).gather(2, known[..., None])[:, skip:, 0]
        points.append((sigma, -float(nats.mean())))
        if sigma_next is not None:
            estimate = ode.advance(estimate, block.point(logits).flatten(0, 1).cpu(), sigma, sigma_next)
    return points


@torch.inference_mode()
def chain_diagnostics(
    blocks: Sequence[Block], partition: NoisePartition, text: Tensor, steps: int, skip: int = 1
) -> dict[str, float]:
    """Losses of neighbouring blocks. text: (windows, length + 1) int64; `steps` Euler steps in each block.

    from_noise_nats: the papers' metric, measured at the last block's sigma_min, with the true prefix.
    from_noise_sigma1_nats: the same at the last evaluation at or above sigma 1, where the papers' range ends; below it
    a slot settles on one sampled byte, and the CE becomes that of a commitment. Missing without such an evaluation.
    """
    rows = text[:, :-1].split(ROWS)
    paths = [from_noise_path(blocks, partition, x, steps, skip=skip, row=i * ROWS) for i, x in enumerate(rows)]
    path = [
        (points[0][0], sum(nats * len(x) for (_, nats), x in zip(points, rows, strict=True)) / len(text))
        for points in zip(*paths, strict=True)
    ]
    losses = {"from_noise_nats": path[-1][1]}
    if above := [nats for sigma, nats in path if sigma >= PAPERS_SIGMA_MIN]:
        losses["from_noise_sigma1_nats"] = above[-1]
    return losses
