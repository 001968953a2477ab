"""The figures that unmask a chain which looks well trained and is not (nats a byte, on validation text)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stages.block import Block
from stages.partition import NoisePartition
from trainer.evaluation import Memory, PathPoint, clean_features, from_noise_path, sigma_max_nats

ROWS = 4
"""Windows that are evaluated at a time."""
PAPERS_SIGMA_MIN = 1.0
"""Where the noise range of BlockTrain (arXiv 2606.24722) ends."""


def scrambled(known: Tensor) -> Tensor:
    """A prefix that says nothing about `known` (batch, positions): another window's bytes, backwards."""
    return known.roll(1, dims=0).flip(1)


@torch.inference_mode()
def chain_diagnostics(
    blocks: list[Block], partition: NoisePartition, text: Tensor, steps: int, skip: int = 1
) -> dict[str, float]:
    """All diagnostics of a whole chain. text: (windows, length + 1) int64; `steps` Euler steps in each block.

    sigma_max_nats: CE of one evaluation at sigma_max.
    from_noise_nats: the papers' metric, read out at sigma_min at the end of the chain, with the true prefix.
    from_noise_sigma1_nats: the same, at the last evaluation at or above sigma 1, where the papers' range ends; below
    it a slot settles on one sampled byte, so that the CE becomes that of a commitment.
    *_scrambled_nats: with another window's prefix; if that is not much worse, the context is unused.
    last_block_from_noise_nats: the last block alone, from pure noise at its own sigma_max.
    """
    known = text[:, :-1]
    true = _mean_path(blocks, blocks, partition, known, known, steps, skip)
    wrong = _mean_path(blocks, blocks, partition, known, scrambled(known), steps, skip)
    alone = _mean_path(blocks, blocks[-1:], partition, known, known, steps, skip)
    losses = {
        "sigma_max_nats": _mean_sigma_max(blocks[:1], partition, known, skip),
        "from_noise_nats": true[-1].nats,
        "from_noise_scrambled_nats": wrong[-1].nats,
        "last_block_from_noise_nats": alone[-1].nats,
    }
    for key, path in (("from_noise_sigma1_nats", true), ("from_noise_sigma1_scrambled_nats", wrong)):
        above = [point.nats for point in path if point.sigma >= PAPERS_SIGMA_MIN]
        if above:
            losses[key] = above[-1]
    return losses


@torch.inference_mode()
def block_diagnostics(
    before: list[Block], block: Block, partition: NoisePartition, text: Tensor, steps: int
) -> dict[str, float]:
    """Those of one block alone, from pure noise at its own sigma_max. before: the blocks whose features it reads."""
    known, blocks = text[:, :-1], [*before, block]
    return {
        "sigma_max_nats": _mean_sigma_max(blocks, partition, known, 1),
        "from_noise_nats": _mean_path(blocks, [block], partition, known, known, steps, 1)[-1].nats,
        "from_noise_scrambled_nats": _mean_path(blocks, [block], partition, known, scrambled(known), steps, 1)[-1].nats,
    }


def _mean_path(
    readers: list[Block],
    denoisers: list[Block],
    partition: NoisePartition,
    known: Tensor,
    prefix: Tensor,
    steps: int,
    skip: int,
) -> list[PathPoint]:
    """`readers` read the prefix one after another; `denoisers`, the last of them, denoise."""
    sigmas: list[float] = []
    totals: list[float] = []
    for row, memories in _memories(readers, prefix):
        part, own = known[row : row + ROWS], memories[-len(denoisers) :]
        path = from_noise_path(denoisers, own, partition, part, steps, skip=skip, row=row)
        sigmas = [point.sigma for point in path]
        sums = [point.nats * len(part) for point in path]
        totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
    return [PathPoint(sigma, total / len(known)) for sigma, total in zip(sigmas, totals, strict=True)]


def _mean_sigma_max(readers: list[Block], partition: NoisePartition, known: Tensor, skip: int) -> float:
    total = 0.0
    for row, memories in _memories(readers, known):
        part = known[row : row + ROWS]
        total += sigma_max_nats(readers[-1], memories[-1], partition, part, skip=skip, row=row) * len(part)
    return total / len(known)


def _memories(readers: list[Block], prefix: Tensor) -> Iterator[tuple[int, list[Memory]]]:
    for row in range(0, len(prefix), ROWS):
        yield row, [memory for _, memory in clean_features(readers, prefix[row : row + ROWS])]
