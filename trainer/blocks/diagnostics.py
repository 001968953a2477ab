"""Cross-entropies of a trained block or chain on known text, and the diagnostics of a chain made of them."""

# The diagnostics reveal chains that look well trained and are not: they ignore their context, or write only from noise
# that still holds the text.

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.stages.model.block import Block
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.pipeline import ArModel
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


# Logits (batch, positions, vocabulary) of what is under each slot, from the place of the block, z, the estimate and
# sigma.
Denoiser = Callable[[int, Tensor, Tensor, float], Tensor]


def chain_denoiser(blocks: list[Block], memories: list[Memory], positions: int) -> Denoiser:
    """Neighbouring blocks, in order. memories: theirs, of the true prefix or another (see `clean_features`)."""
    # Every position is a chunk of its own, so no slot sees another (BlockTrain, arXiv 2606.24722). It does not describe
    # a one-sweep text, whose positions after the first have no true prefix.
    mask = ChunkLayout(positions, 1).mask()

    def denoise(place: int, z: Tensor, before: Tensor, sigma: float) -> Tensor:
        return blocks[place].denoise(z, before, torch.full((1, 1), sigma), memories[place], 0, mask)

    return denoise


def bayes_denoiser(prior: Tensor, codes: Tensor) -> Denoiser:
    """The exact denoiser of text with known odds: softmax(ln prior + z . code / sigma^2) (Bayes).

    prior: ln of the odds of each byte given those before it, (batch, positions, vocabulary); codes: of equal norms.
    """

    def denoise(_: int, z: Tensor, __: Tensor, sigma: float) -> Tensor:
        return prior + z @ codes.T / (sigma * sigma)

    return denoise


def from_noise_path(
    denoise: Denoiser,
    ranges: Sequence[tuple[float, float]],
    codes: Tensor,
    known: Tensor,
    steps: int,
    *,
    skip: int = 1,
    row: int = 0,
    draws: int = 1,
) -> list[PathPoint]:
    """CE of each byte while its slot is denoised from pure noise: one point an evaluation.

    ranges: of sigma, of each block; known: (batch, positions) int64; `steps` Euler steps a block, starting at the first
    block's own sigma_max, and one more evaluation at the last block's sigma_min; bytes before `skip` are not counted;
    `row` is the number of known[0] in a larger set, whose noise it takes; of several `draws` of noise the odds are
    averaged.
    """
    (batch, length), dim = known.shape, codes.shape[1]
    spans = [(place, *step) for place, span in enumerate(ranges) for step in pairwise(step_sigmas(*span, steps))]
    evaluations = [*spans, (len(ranges) - 1, ranges[-1][1], None)]
    totals = [torch.tensor(-math.inf)] * len(evaluations)
    for draw in range(draws):
        ode = Ode(draw, row * length, batch * length, dim, ranges[0][0], 1.0)
        estimate = torch.zeros(batch * length, dim)
        for i, (place, sigma, sigma_next) in enumerate(evaluations):
            z, before = (x.view(batch, length, dim) for x in (ode.state(estimate, sigma, i), estimate))
            logits = denoise(place, z, before, sigma).float()
            nats = logits.log_softmax(-1).gather(2, known[..., None])[:, skip:, 0]
            totals[i] = torch.logaddexp(totals[i], nats)
            if sigma_next is not None:
                denoised = (logits.softmax(-1) @ codes).flatten(0, 1)
                estimate = ode.advance(estimate, denoised, sigma, sigma_next)
    points = zip(evaluations, totals, strict=True)
    return [PathPoint(sigma, math.log(draws) - float(total.mean())) for (_, sigma, _), total in points]


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


AVERAGED_WINDOWS, DRAWS = 4, 16  # for the odds averaged over noise, which cost a path for each draw


@torch.inference_mode()
def noise_floors(
    blocks: list[Block], partition: NoisePartition, reference: ArModel, text: Tensor, steps: int, skip: int = 1
) -> dict[str, tuple[float, int]]:
    """From-noise figures of the exact denoiser with the odds of `reference`, and of odds averaged over noise.

    Even a perfect chain pays for its one draw of noise, since the mean of -ln p is more than -ln of the mean (Jensen):
    bayes_nats stands beside `from_noise_nats`, sigma1_bayes_nats beside `from_noise_sigma1_nats`. averaged_*: from the
    mean of the odds over DRAWS, read at sigma 1 on a few windows, of the chain and of the exact denoiser, and the
    `reference` itself. With each figure comes its number of windows.
    """
    codes, ranges = blocks[0].codes, [partition.range(block.index) for block in blocks]
    known, few = text[:, :-1], text[:: -(-len(text) // AVERAGED_WINDOWS), :-1]

    def odds(part: Tensor) -> Tensor:
        # nothing stands before a window's first byte, and it is never counted
        logits = F.pad(reference(part[:, :-1]).float(), (0, 0, 1, 0))
        return logits.log_softmax(-1)

    def path_of(part: Tensor, row: int, draws: int) -> list[PathPoint]:
        denoise = bayes_denoiser(odds(part), codes)
        return from_noise_path(denoise, ranges, codes, part, steps, skip=skip, row=row, draws=draws)

    def bayes(known: Tensor, draws: int) -> list[PathPoint]:
        return _mean([(len(part), path_of(part, i * ROWS, draws)) for i, part in enumerate(known.split(ROWS))])

    one = bayes(known, 1)
    floors = {"bayes_nats": (one[-1].nats, len(known))}
    if _at_sigma1(one):
        nats = [next_byte_nats(reference(part[:, :-1]), part, skip) * len(part) for part in few.split(ROWS)]
        averaged = _mean_path(blocks, blocks, partition, few, few, steps, skip, DRAWS)
        floors["sigma1_bayes_nats"] = (_at_sigma1(one), len(known))
        floors["averaged_nats"] = (_at_sigma1(averaged), len(few))
        floors["averaged_bayes_nats"] = (_at_sigma1(bayes(few, DRAWS)), len(few))
        floors["averaged_reference_nats"] = (sum(nats) / len(few), len(few))
    return floors


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
    draws: int = 1,
) -> list[PathPoint]:
    """`readers` read the prefix one after another; `denoisers`, the last of them, denoise."""
    paths, codes, ranges = [], readers[0].codes, [partition.range(block.index) for block in denoisers]
    for row, memories in _memories(readers, prefix):
        part, own = known[row : row + ROWS], memories[-len(denoisers) :]
        denoise = chain_denoiser(denoisers, own, part.shape[1])
        path = from_noise_path(denoise, ranges, codes, part, steps, skip=skip, row=row, draws=draws)
        paths.append((len(part), path))
    return _mean(paths)


def _mean(paths: list[tuple[int, list[PathPoint]]]) -> list[PathPoint]:
    """The mean over windows of the paths of some windows each."""
    count = sum(windows for windows, _ in paths)
    by_evaluation = zip(*(path for _, path in paths), strict=True)
    return [
        PathPoint(points[0].sigma, sum(p.nats * n for p, (n, _) in zip(points, paths, strict=True)) / count)
        for points in by_evaluation
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
