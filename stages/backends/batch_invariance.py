"""Batch invariance: measures, where the weights are served, if a row's results depend on the rows beside it.

Matrix libraries choose their kernels by shape and processor, and promise nothing about last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, StageRunner
from stages.model.block import Block
from stages.model.families import PipelineStage
from stages.model.layers import LayerCache
from stages.model.pipeline import new_caches

log = logging.getLogger(__name__)

Sizes = Sequence[tuple[int, int]]
# Pieces that are computed together: (new positions, positions before them).
MIXTURES: tuple[Sizes, ...] = (
    ((1, 9), (1, 0), (1, 23)),
    tuple((1, past) for past in range(0, 33, 3)),
    ((1, 30), (6, 0), (17, 5), (1, 2), (3, 40)),
)
SIGMAS = (3.0, 0.5, 0.5)
FORKS = (3, 1, 8, 2)  # branches in the pieces of a mixture


class OneBlockAtATime(BlockRunner):
    """A runner for machines on which pieces must not be computed together."""

    def __init__(self, runner: BlockRunner) -> None:
        self.runner = runner

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [result for piece in pieces for result in self.runner.read([piece])]

    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [result for piece in pieces for result in self.runner.denoise([piece])]


class OneStageAtATime(StageRunner):
    """The same for a stage of an AR pipeline."""

    def __init__(self, runner: StageRunner) -> None:
        self.runner = runner

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [result for piece in pieces for result in self.runner.read([piece])]

    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return [result for piece in pieces for result in self.runner.branch([piece])]

    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return [result for piece in hidden for result in self.runner.next_byte([piece])]


def checked_block(runner: BlockRunner, block: Block) -> BlockRunner:
    """`runner`, or one that computes piece by piece where `check_rows` fails."""
    if check_rows(runner, block):
        return runner
    _warn(block)
    return OneBlockAtATime(runner)


def checked_stage(runner: StageRunner, stage: PipelineStage) -> StageRunner:
    """`runner`, or one that computes piece by piece where `check_rows` fails."""
    if check_rows(runner, stage):
        return runner
    _warn(stage)
    return OneStageAtATime(runner)


@torch.inference_mode()
def check_rows(runner: BlockRunner | StageRunner, part: Block | PipelineStage) -> bool:
    """Compute a few mixtures of pieces together and alone: whether every bit is the same.

    It holds for this machine, this number of threads and these shapes. Takes a few steps' time.
    """
    return all(
        torch.equal(one, other)
        for mixture in MIXTURES
        for together, alone in _results(runner, part, mixture)
        for one, other in zip(together, alone, strict=True)
    )


def _results(
    runner: BlockRunner | StageRunner, part: Block | PipelineStage, mixture: Sizes
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    room = part.architecture.positions
    sizes = [(new, min(past, room - new)) for new, past in mixture if new <= room]
    clean = [_clean_piece(part, new, past, generator) for new, past in sizes]
    copies = [replace(piece, caches=[_copy(cache) for cache in piece.caches]) for piece in clean]
    together = runner.read(clean)
    yield together, [result for piece in copies for result in runner.read([piece])]
    yield _stored(clean), _stored(copies)
    if isinstance(runner, BlockRunner):
        assert isinstance(part, Block)
        sigmas = SIGMAS * len(sizes)
        noisy = [_noisy_piece(part, *each, generator) for each in zip(sizes, sigmas, strict=False)]
        yield _tensors(runner.denoise(noisy)), _tensors([runner.denoise([piece])[0] for piece in noisy])
        return
    branches = [_branch_piece(part, *each, generator) for each in zip(FORKS, sizes, strict=False)]
    yield runner.branch(branches), [runner.branch([piece])[0] for piece in branches]
    assert not isinstance(part, Block)
    if part.is_last:
        yield runner.next_byte(together), [runner.next_byte([hidden])[0] for hidden in together]


def _clean_piece(part: Block | PipelineStage, new: int, past: int, generator: torch.Generator) -> CleanPiece:
    return CleanPiece(_source(part, new, generator), _caches(part, past, new, generator))


def _branch_piece(
    part: Block | PipelineStage, branches: int, size: tuple[int, int], generator: torch.Generator
) -> BranchPiece:
    new, past = size
    source = _source(part, branches * new, generator).unflatten(0, (branches, new))
    return BranchPiece(source, _caches(part, past, 0, generator))


def _source(part: Block | PipelineStage, positions: int, generator: torch.Generator) -> Tensor:
    if part.embedding is None:
        return torch.randn(positions, part.architecture.width, generator=generator)
    return torch.randint(part.architecture.vocabulary, (positions,), generator=generator)


def _noisy_piece(part: Block, size: tuple[int, int], sigma: float, generator: torch.Generator) -> NoisyPiece:
    slots, start = size
    z, estimate = torch.randn(2, slots, part.architecture.code_dim, generator=generator)
    return NoisyPiece(z, estimate, sigma, start, _caches(part, start, 0, generator))


def _caches(part: Block | PipelineStage, length: int, room: int, generator: torch.Generator) -> list[LayerCache]:
    caches = new_caches(len(part.layers), part.architecture, length + room)
    for cache in caches:
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
        cache.length = length
    return caches


def _copy(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.keys.clone(), cache.values.clone(), cache.length)


def _stored(pieces: Sequence[CleanPiece]) -> list[Tensor]:
    return [tensor for piece in pieces for cache in piece.caches for tensor in cache.stored()]


def _tensors(results: Sequence[Denoised]) -> list[Tensor]:
    return [tensor for result in results for tensor in (result.logits, result.point)]


def _warn(part: Block | PipelineStage) -> None:
    log.warning(
        "part %d: on this machine a request's results would depend on those computed beside it, so requests are "
        "computed one at a time",
        part.index,
    )
