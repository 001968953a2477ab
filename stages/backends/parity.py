"""The gate of an exported graph: it must compute what the loaded module computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, NoisyPiece, StageRunner
from stages.errors import CheckpointError
from stages.model.block import Block
from stages.model.families import PipelineStage
from stages.model.pipeline import new_caches

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
    half = min(POSITIONS, a.context_bytes) // 2
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


def _compare(found: Tensor, expected: Tensor, part: Block | PipelineStage, int8: bool) -> None:
    error = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    tolerance = INT8_TOLERANCE if int8 else TOLERANCE
    if not error <= tolerance:  # true for NaN too
        raise CheckpointError(
            f"part {part.index}: an ONNX export that does not match: its numbers differ from torch's by {error:.2g} "
            f"(at most {tolerance} is allowed); serve this checkpoint with the torch backend"
        )
