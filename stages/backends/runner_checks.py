"""Checks a runner on the serving machine: a row's results must not depend on the other rows of its batch.

Matrix libraries choose their kernels by shape and processor, and promise nothing about last bits.
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, Denoised, NoisyPiece, PictureRunner, StageRunner
from stages.backends.packed import PipelineRunner
from stages.checkpoint.checkpoint import CPU, KERNEL_TOLERANCE, AnyPart, check_measures, load_part, read_part, stage_of
from stages.checkpoint.gate import PROBE_INPUT, PROBE_OUTPUT, probe_stage, probe_tokens
from stages.errors import CheckpointError
from stages.model.block import Block
from stages.model.few_bits import GroupedLinear
from stages.model.layers import LayerCache
from stages.model.pipeline import PipelineStage, new_caches
from stages.pictures.part import PicturePart
from stages.pictures.trajectory import PicturePiece

log = logging.getLogger(__name__)

AnyRunner = BlockRunner | StageRunner | PictureRunner
Runner = TypeVar("Runner", BlockRunner, StageRunner, PictureRunner)
SR = TypeVar("SR", bound=StageRunner)
Sizes = Sequence[tuple[int, int]]
# Pieces computed together: (new positions, positions before them).
MIXTURES: tuple[Sizes, ...] = (
    ((1, 9), (1, 0), (1, 23)),
    tuple((1, past) for past in range(0, 33, 3)),
    ((1, 30), (6, 0), (17, 5), (1, 2), (3, 40)),
)
SLABS: Sizes = ((40, 0), (1, 9), (50, 3))  # for devices whose rows come in slabs: more rows than one slab has
SIGMAS = (3.0, 0.5, 0.5)
PICTURES = (1, 3, 5)  # pictures in the pieces of a mixture
FORKS = (3, 1, 8, 2)  # branches in the pieces of a mixture


class OneAtATime(BlockRunner, StageRunner, PictureRunner):
    """A runner for machines on which pieces, and the pictures of one piece, must not be computed together."""

    def __init__(self, runner: AnyRunner) -> None:
        self.runner: Any = runner

    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        return [result for piece in pieces for result in self.runner.read([piece])]

    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [result for piece in pieces for result in self.runner.denoise([piece])]

    def branch(self, pieces: Sequence[BranchPiece]) -> list[Tensor]:
        return [result for piece in pieces for result in self.runner.branch([piece])]

    def next_byte(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return [result for piece in hidden for result in self.runner.next_byte([piece])]

    def evaluate(self, pieces: Sequence[PicturePiece]) -> list[Tensor]:
        return [torch.cat([self.runner.evaluate([each])[0] for each in piece.split(1)]) for piece in pieces]


def checked(runner: Runner, part: AnyPart) -> Runner:
    """`runner`, or one that computes piece by piece if results of pieces would depend on each other."""
    if check_rows(runner, part):
        return runner
    log.warning(
        "part %d: on this machine batching would change the results of a request, so requests are "
        "computed one at a time",
        part.index,
    )
    return cast(Runner, OneAtATime(runner))


def check_rows(runner: AnyRunner, part: AnyPart) -> bool:
    """Compute a few mixtures of pieces together and alone. True if every bit is the same on this machine.

    For a stage, its first layers are enough, with one of each kind.
    """
    on_device = not isinstance(part, PicturePart) and not part.rotary.is_cpu
    runner, layers = shortened(runner, 0)
    return all(
        torch.equal(*both)
        for mixture in ((*MIXTURES, SLABS) if on_device else MIXTURES)
        for both in zip(
            _outputs(runner, part, mixture, layers), _outputs(OneAtATime(runner), part, mixture, layers), strict=True
        )
    )


def shortened(runner: AnyRunner, layers: int) -> tuple[Any, int]:
    """A stage's runner with only its first layers, including one of each kind, and their number: layers of a kind have
    equal shapes, and so the same kernels. Any other runner as it is, with its `layers`."""
    if not isinstance(runner, PipelineRunner):
        return runner, layers
    short = copy(runner)
    short.reader = runner.reader.shortened()
    return short, len(short.reader.kind_of)


def load_runner(directory: Path, index: int, compute: Callable[[PipelineStage], SR], device: torch.device = CPU) -> SR:
    """Load a checkpoint's stage with `compute`. The probe checks the runner, not the module, which would take seconds
    per gigabyte."""
    part, manifest, probe = read_part(directory, index, device)
    runner = compute(stage := stage_of(part, directory))
    entering, leaving, read = probe.get(PROBE_INPUT), probe.get(PROBE_OUTPUT), partial(_read_alone, runner, stage)
    measures, _ = probe_stage(stage, probe_tokens(manifest), entering, leaving, read)
    try:
        rounds = any(isinstance(each, GroupedLinear) for each in stage.modules())
        check_measures(directory, manifest, index, measures, KERNEL_TOLERANCE if rounds else 0.0)
    except CheckpointError:  # from the weights, or from products that round more than others: the module tells which
        load_part(directory, index, device)
    return runner


def _read_alone(runner: StageRunner, stage: PipelineStage, source: Tensor) -> tuple[Tensor, Tensor | None]:
    caches = new_caches(len(stage.layers), stage.architecture, len(source), device=stage.rotary.device)
    (hidden,) = runner.read([CleanPiece(source.cpu(), caches)])
    return hidden, runner.next_byte([hidden])[0] if stage.is_last else None


@torch.inference_mode()
def _outputs(runner: Any, part: AnyPart, mixture: Sizes, layers: int) -> list[Tensor]:  # noqa: ANN401 - of its kind
    """All results of a part's runner for pieces of these sizes, from the same numbers each time.

    :param layers: layers of the runner, if fewer than the part's.
    """
    generator = torch.Generator().manual_seed(0)
    if isinstance(part, PicturePart):
        pictures = [_picture_piece(part, *each, generator) for each in zip(PICTURES, SIGMAS, strict=True)]
        return list(runner.evaluate(pictures))
    room = part.architecture.positions
    sizes = [(new, min(past, room - new)) for new, past in mixture if new <= room]  # only those that fit its context
    clean = [clean_piece(part, *size, generator, layers=layers) for size in sizes]
    found = [*runner.read(clean)]
    found += [tensor for piece in clean for cache in piece.caches for tensor in cache.stored()]
    if isinstance(part, Block):
        noisy = [_noisy_piece(part, *each, generator) for each in zip(sizes, SIGMAS * len(sizes), strict=False)]
        return found + [tensor for each in runner.denoise(noisy) for tensor in (each.logits, each.point)]
    found += runner.branch(
        [
            BranchPiece(source_of(part, (branches, new), generator), caches_of(part, past, 0, generator, layers))
            for branches, (new, past) in zip(FORKS, sizes, strict=False)
        ]
    )
    if part.is_last:
        hidden = torch.randn(sum(new for new, _ in sizes), part.architecture.width, generator=generator)
        found += runner.next_byte(hidden.split([new for new, _ in sizes]))
    return found


def _picture_piece(part: PicturePart, count: int, sigma: float, generator: torch.Generator) -> PicturePiece:
    a = part.architecture
    x = torch.randn(count, a.tokens, a.patch_dim if part.reads_patches else a.features, generator=generator)
    return PicturePiece(x, sigma, torch.randint(len(a.classes) + 1, (count,), generator=generator))


def clean_piece(
    part: Block | PipelineStage, new: int, past: int, generator: torch.Generator, room: int = 0, layers: int = 0
) -> CleanPiece:
    """New positions after `past` ones, with room for more."""
    return CleanPiece(source_of(part, (new,), generator), caches_of(part, past, new + room, generator, layers))


def _noisy_piece(part: Block, size: tuple[int, int], sigma: float, generator: torch.Generator) -> NoisyPiece:
    slots, start = size
    z, estimate = torch.randn(2, slots, part.architecture.code_dim, generator=generator)
    return NoisyPiece(z, estimate, sigma, start, caches_of(part, start, 0, generator))


def caches_of(
    part: Block | PipelineStage, length: int, room: int, generator: torch.Generator, layers: int = 0
) -> list[LayerCache]:
    """Caches of a part's layers, or of `layers`, with random numbers at `length` positions, and room for more."""
    caches = new_caches(layers or len(part.layers), part.architecture, length + room)
    for cache in caches:
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
        cache.length = length
    device = part.rotary.device  # a generator belongs to one device: this one gives the same numbers on all
    return [LayerCache(cache.keys.to(device), cache.values.to(device), length) for cache in caches]


def source_of(part: Block | PipelineStage, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Tokens or hidden states, depending on the part's input."""
    if part.embedding is None:
        return torch.randn(*shape, part.architecture.width, generator=generator)
    # few tokens: rows read from a mapped embedding stay in memory
    return torch.randint(min(part.architecture.vocabulary, 256), shape, generator=generator)
