"""Cross-entropies of a trained block or chain on known text, and the diagnostics of a chain made of them."""

# The diagnostics reveal chains that look well trained and are not: they ignore their context, or write only from noise
# that still holds the text.

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.stages.model.block import Block
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.randomness import Purpose, normals
from onesweep.stages.model.samplers import Ode, step_sigmas
from onesweep.trainer.blocks.losses import ChunkLayout

Memory = list[tuple[Tensor, Tensor]]


class PathPoint(NamedTuple):
    """Cross-entropy (CE) of one evaluation on the way from noise to text."""

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
    """CE of next-symbol logits (batch, length, vocabulary) on text (batch, length + 1), from `skip` (1 or more) on."""
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
    """CE of each byte while its slot is denoised from pure noise by neighbouring blocks: one point an evaluation.

    memories: theirs, of the true prefix or another (see `clean_features`); known: (batch, positions) int64. There are
    `steps` Euler steps a block, from the first block's own sigma_max on, and one more evaluation at the last block's
    sigma_min. Bytes before `skip` are not counted. `row` is the number of known[0] in a larger set, whose noise it has.
    """
    # Every position is a chunk of its own, so no slot sees another (BlockTrain, arXiv 2606.24722). It does not describe
    # a one-sweep text, whose positions after the first have no true prefix.
    (batch, length), codes = known.shape, blocks[0].codes
    mask, ranges = ChunkLayout(length, 1).mask(), [partition.range(block.index) for block in blocks]
    spans = [(place, *step) for place, span in enumerate(ranges) for step in pairwise(step_sigmas(*span, steps))]
    ode = Ode(0, row * length, batch * length, codes.shape[1], ranges[0][0], 1.0)
    estimate, points = torch.zeros(batch * length, codes.shape[1]), list[PathPoint]()
    for i, (place, sigma, sigma_next) in enumerate([*spans, (len(ranges) - 1, ranges[-1][1], None)]):
        z, before = (x.view(batch, length, -1) for x in (ode.state(estimate, sigma, i), estimate))
        logits = blocks[place].denoise(z, before, torch.full((1, 1), sigma), memories[place], 0, mask).float()
        points.append(PathPoint(sigma, _cross_entropy(logits[:, skip:], known[:, skip:])))
        if sigma_next is not None:
            denoised = (logits.softmax(-1) @ codes).flatten(0, 1)
            estimate = ode.advance(estimate, denoised, sigma, sigma_next)
    return points


def sigma_max_nats(
    block: Block, memory: Memory, partition: NoisePartition, known: Tensor, *, skip: int = 1, row: int = 0
) -> float:
    """CE of one evaluation at a block's own sigma_max, where z holds almost nothing: that of the context alone."""
    sigma = partition.range(block.index)[0]
    dim = block.architecture.code_dim
    eps = normals(1, Purpose.INITIAL_NOISE, row * known.shape[1], known.numel(), dim)
    z = block.codes[known] + sigma * eps.reshape(*known.shape, -1)
    mask = ChunkLayout(known.shape[1], 1).mask()
    logits = block.denoise(z, torch.zeros_like(z), torch.full((1, 1), sigma), memory, 0, mask)
    return _cross_entropy(logits[:, skip:], known[:, skip:])


def _cross_entropy(logits: Tensor, target: Tensor) -> float:
    return float(F.cross_entropy(logits.float().flatten(0, -2), target.reshape(-1)))


ROWS = 4  # windows evaluated at a time
PAPERS_SIGMA_MIN = 1.0  # end of the noise range of BlockTrain (arXiv 2606.24722)


def scrambled(known: Tensor) -> Tensor:
    """A prefix unrelated to `known` (batch, positions): another window's bytes, backwards."""
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
        if above := _at_sigma1(path):
            losses[key] = above
    return losses


def _at_sigma1(path: list[PathPoint]) -> float:
    """CE of the last evaluation in the papers' range; 0 where there is none."""
    return next((point.nats for point in reversed(path) if point.sigma >= PAPERS_SIGMA_MIN), 0.0)


@torch.inference_mode()
def block_diagnostics(
    before: list[Block], block: Block, partition: NoisePartition, text: Tensor, steps: int
) -> dict[str, float]:
    """Diagnostics of one block alone, from noise at its own sigma_max. before: the blocks whose features it reads."""
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
    """`readers` read the prefix one after another; `denoisers`, the last of them, denoise. The mean over windows."""
    paths = []
    for row, memories in _memories(readers, prefix):
        part, own = known[row : row + ROWS], memories[-len(denoisers) :]
        paths.append((len(part), from_noise_path(denoisers, own, partition, part, steps, skip=skip, row=row)))
    return [
        PathPoint(points[0].sigma, sum(p.nats * n for p, (n, _) in zip(points, paths, strict=True)) / len(known))
        for points in zip(*(path for _, path in paths), strict=True)
    ]


def _mean_sigma_max(readers: list[Block], partition: NoisePartition, known: Tensor, skip: int) -> float:
    total = 0.0
    for row, memories in _memories(readers, known):
        part = known[row : row + ROWS]
        total += sigma_max_nats(readers[-1], memories[-1], partition, part, skip=skip, row=row) * len(part)
    return total / len(known)


def _memories(readers: list[Block], prefix: Tensor) -> Iterator[tuple[int, list[Memory]]]:
    for row in range(0, len(prefix), ROWS):
        yield row, [memory for _, memory in clean_features(readers, prefix[row : row + ROWS])]
