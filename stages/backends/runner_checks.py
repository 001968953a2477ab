"""Checks of a runner where the weights are served: it computes what the loaded module computes, and a row's results do
not depend on the rows beside it.

Matrix libraries choose their kernels by shape and processor, and promise nothing about last bits.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from stages.backends.base import (
    BlockRunner,
    BranchPiece,
    CleanPiece,
    Denoised,
    NoisyPiece,
    PictureRunner,
    StageRunner,
)
from stages.errors import CheckpointError
from stages.model.block import Block
from stages.model.layers import LayerCache
from stages.model.pipeline import PipelineStage, new_caches
from stages.pictures.part import PicturePart
from stages.pictures.trajectory import PicturePiece

log = logging.getLogger(__name__)

Runner = TypeVar("Runner", BlockRunner, StageRunner)
Sizes = Sequence[tuple[int, int]]
# Pieces that are computed together: (new positions, positions before them).
MIXTURES: tuple[Sizes, ...] = (
    ((1, 9), (1, 0), (1, 23)),
    tuple((1, past) for past in range(0, 33, 3)),
    ((1, 30), (6, 0), (17, 5), (1, 2), (3, 40)),
)
SLABS: Sizes = ((40, 0), (1, 9), (50, 3))  # for devices whose rows come in slabs: more of them than one has
SIGMAS = (3.0, 0.5, 0.5)
PICTURES = (1, 3, 5)  # in the pieces of a mixture
FORKS = (3, 1, 8, 2)  # branches in the pieces of a mixture


class OneAtATime(BlockRunner, StageRunner):
    """A runner of a block or a stage for machines on which pieces must not be computed together."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - a BlockRunner or a StageRunner
        self.runner = runner

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [result for piece in pieces for result in self.runner.read([piece])]

    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [result for piece in pieces for result in self.runner.denoise([piece])]

    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return [result for piece in pieces for result in self.runner.branch([piece])]

    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return [result for piece in hidden for result in self.runner.next_byte([piece])]


class OnePictureAtATime(PictureRunner):
    """The same for pictures, for those of one request are company, too."""

    def __init__(self, runner: PictureRunner) -> None:
        self.runner = runner

    def evaluate(self, pieces: Sequence[PicturePiece]) -> list[Tensor]:
        return [torch.cat([self.runner.evaluate([each])[0] for each in _single(piece)]) for piece in pieces]


DEPENDENT = (
    "part %d: on this machine a request's results would depend on those computed beside it, so requests are computed "
    "one at a time"
)


def checked(runner: Runner, part: Block | PipelineStage) -> Runner:
    """`runner`, or one that computes piece by piece where `check_rows` fails."""
    if check_rows(runner, part):
        return runner
    log.warning(DEPENDENT, part.index)
    return cast(Runner, OneAtATime(runner))


def checked_pictures(runner: PictureRunner, part: PicturePart) -> PictureRunner:
    """`runner`, or one that computes picture by picture where their results would depend on each other."""
    generator = torch.Generator().manual_seed(0)
    pieces = [_picture_piece(part, *each, generator) for each in zip(PICTURES, SIGMAS, strict=True)]
    together = runner.evaluate(pieces)
    alone = OnePictureAtATime(runner).evaluate(pieces)
    if all(torch.equal(*both) for both in zip(together, alone, strict=True)):
        return runner
    log.warning(DEPENDENT, part.index)
    return OnePictureAtATime(runner)


def _picture_piece(part: PicturePart, count: int, sigma: float, generator: torch.Generator) -> PicturePiece:
    a = part.architecture
    x = torch.randn(count, a.tokens, a.patch_dim if part.reads_patches else a.features, generator=generator)
    return PicturePiece(x, sigma, torch.randint(len(a.classes) + 1, (count,), generator=generator))


def _single(piece: PicturePiece) -> Iterator[PicturePiece]:
    return (PicturePiece(piece.x[i : i + 1], piece.sigma, piece.classes[i : i + 1]) for i in range(len(piece.x)))


@torch.inference_mode()
def check_rows(runner: BlockRunner | StageRunner, part: Block | PipelineStage) -> bool:
    """Compute a few mixtures of pieces together and alone: whether every bit is the same.

    It holds for this machine, this number of threads and these shapes. Takes a few steps' time.
    """
    return all(
        torch.equal(one, other)
        for mixture in (MIXTURES if part.rotary.is_cpu else (*MIXTURES, SLABS))
        for together, alone in _results(runner, part, mixture)
        for one, other in zip(together, alone, strict=True)
    )


def _results(
    runner: BlockRunner | StageRunner, part: Block | PipelineStage, mixture: Sizes
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    room = part.architecture.positions
    sizes = [(new, min(past, room - new)) for new, past in mixture if new <= room]
    clean = [CleanPiece(_source(part, (new,), generator), _caches(part, past, new, generator)) for new, past in sizes]
    copies = [replace(piece, caches=[_copy(cache) for cache in piece.caches]) for piece in clean]
    together = runner.read(clean)
    yield together, [result for piece in copies for result in runner.read([piece])]
    yield _stored(clean), _stored(copies)
    if isinstance(part, Block):
        assert isinstance(runner, BlockRunner)
        sigmas = SIGMAS * len(sizes)
        noisy = [_noisy_piece(part, *each, generator) for each in zip(sizes, sigmas, strict=False)]
        yield _tensors(runner.denoise(noisy)), _tensors([runner.denoise([piece])[0] for piece in noisy])
        return
    assert isinstance(runner, StageRunner)
    branches = [_branch_piece(part, *each, generator) for each in zip(FORKS, sizes, strict=False)]
    yield runner.branch(branches), [runner.branch([piece])[0] for piece in branches]
    if part.is_last:
        yield runner.next_byte(together), [runner.next_byte([hidden])[0] for hidden in together]


def _branch_piece(
    part: Block | PipelineStage, branches: int, size: tuple[int, int], generator: torch.Generator
) -> BranchPiece:
    new, past = size
    source = _source(part, (branches, new), generator)
    return BranchPiece(source, _caches(part, past, 0, generator))


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
    # the same numbers on every device: a generator is of one
    device = part.rotary.device
    return [LayerCache(cache.keys.to(device), cache.values.to(device), length) for cache in caches]


def _copy(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.keys.clone(), cache.values.clone(), cache.length)


def _stored(pieces: Sequence[CleanPiece]) -> list[Tensor]:
    return [tensor for piece in pieces for cache in piece.caches for tensor in cache.stored()]


def _tensors(results: Sequence[Denoised]) -> list[Tensor]:
    return [tensor for result in results for tensor in (result.logits, result.point)]


# Parity of an exported graph with the module that it was made of.
TOLERANCE = 1e-3  # largest difference, relative to the largest number where that is over one
INT8_TOLERANCE = 0.25
SIGMA = 1.0
POSITIONS = 24
BRANCHES = 3


class ReadProbe:
    """A few positions at once, then one more, which goes through the cache."""

    @torch.inference_mode()
    def __init__(self, part: Block | PipelineStage, read: Callable[..., Tensor]) -> None:
        a, generator = part.architecture, torch.Generator().manual_seed(0)
        self.part, self.count = part, min(POSITIONS, a.positions)
        self.source = _source(part, (self.count,), generator)
        caches = new_caches(len(part.layers), a, self.count)
        self.expected = [read(piece[None], caches)[0] for piece in self._pieces()]

    def check(self, runner: BlockRunner | StageRunner, int8: bool) -> None:
        caches = new_caches(len(self.part.layers), self.part.architecture, self.count)
        for piece, expected in zip(self._pieces(), self.expected, strict=True):
            _compare(runner.read([CleanPiece(piece, caches)])[0], expected, self.part, int8)

    def _pieces(self) -> tuple[Tensor, Tensor]:
        return self.source[:-1], self.source[-1:]


class PictureProbe:
    """Outputs of a part for a few pictures of noise, noted before a backend takes its matrices over."""

    @torch.inference_mode()
    def __init__(self, part: PicturePart) -> None:
        self.part, generator = part, torch.Generator().manual_seed(0)
        self.piece = _picture_piece(part, BRANCHES, SIGMA, generator)
        self.expected = part(self.piece.x, torch.full((BRANCHES,), SIGMA), self.piece.classes)

    def check(self, runner: PictureRunner, int8: bool = False) -> None:
        """Raises CheckpointError where a runner of the part disagrees with it."""
        _compare(runner.evaluate([self.piece])[0], self.expected, self.part, int8)


class StageProbe:
    """Outputs of a stage at a few positions, noted before a backend takes its matrices over."""

    @torch.inference_mode()
    def __init__(self, stage: PipelineStage) -> None:
        a, generator = stage.architecture, torch.Generator().manual_seed(1)
        self.stage, self.reading = stage, ReadProbe(stage, stage.read)
        half = min(POSITIONS, a.positions) // 2
        self.branches = _source(stage, (BRANCHES, half), generator)
        self.caches = new_caches(len(stage.layers), a, 2 * half)
        for cache in self.caches:
            cache.append(*torch.randn(2, *cache.keys[:, :, :half].shape, generator=generator))
        self.forked = [stage.read(branch[None], copy.deepcopy(self.caches))[0] for branch in self.branches]
        self.hidden = self.reading.expected[-1]
        self.logits = stage.next_byte(self.hidden) if stage.is_last else None

    @torch.inference_mode()
    def check(self, runner: StageRunner, int8: bool = False) -> None:
        """Raises CheckpointError where a runner of the stage disagrees with it."""
        self.reading.check(runner, int8)
        for found, expected in zip(
            runner.branch([BranchPiece(self.branches, self.caches)])[0], self.forked, strict=True
        ):
            _compare(found, expected, self.stage, int8)
        if self.logits is not None:
            _compare(runner.next_byte([self.hidden])[0], self.logits, self.stage, int8)


@torch.inference_mode()
def check_block(runner: BlockRunner, block: Block, int8: bool = False) -> None:
    """Raises CheckpointError when a block's runner and the block disagree on a probe."""
    ReadProbe(block, lambda source, caches: block.read(source, caches)[0]).check(runner, int8)
    generator = torch.Generator().manual_seed(0)
    a = block.architecture
    half = min(POSITIONS, a.context_length) // 2
    caches = new_caches(a.layers, a, half)
    for cache in caches:
        cache.append(*torch.randn(2, *cache.keys.shape, generator=generator))
    z, estimate = torch.randn(2, half, a.code_dim, generator=generator)
    (denoised,) = runner.denoise([NoisyPiece(z, estimate * block.data_std, SIGMA, half, caches)])
    memory = [cache.stored() for cache in caches]
    logits = block.denoise(z[None], estimate[None] * block.data_std, torch.full((1, 1), SIGMA), memory, half)
    _compare(denoised.logits, logits[0], block, int8)
    _compare(denoised.point, block.point(logits)[0], block, int8)


def _source(part: Block | PipelineStage, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if part.embedding is None:
        return torch.randn(*shape, part.architecture.width, generator=generator)
    return torch.randint(part.architecture.vocabulary, shape, generator=generator)


def _compare(found: Tensor, expected: Tensor, part: Block | PipelineStage | PicturePart, int8: bool) -> None:
    error = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    tolerance = INT8_TOLERANCE if int8 else TOLERANCE
    if not error <= tolerance:  # true for NaN too
        raise CheckpointError(
            f"part {part.index}: an ONNX export that does not match: its numbers differ from torch's by {error:.2g} "
            f"(at most {tolerance} is allowed); serve this checkpoint with the torch backend"
        )
