"""The gate of an exported graph: it must compute what the loaded module computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from stages.ar import new_caches
from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, NoisyPiece, StageRunner
from stages.block import Block
from stages.errors import CheckpointError
from stages.families import PipelineStage

TOLERANCE = 1e-3
"""Largest difference, relative to the largest number where that is over one."""
INT8_TOLERANCE = 0.25
SIGMA = 1.0
POSITIONS = 24
BRANCHES = 3


@torch.inference_mode()
def check_block(runner: BlockRunner, block: Block, int8: bool = False) -> None:
    """Raises CheckpointError when a block's runner and the block disagree on a probe."""
    _check_read(runner, block, lambda source, caches: block.read(source, caches)[0], int8)
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


@torch.inference_mode()
def check_stage(runner: StageRunner, stage: PipelineStage, int8: bool = False) -> None:
    """Raises CheckpointError when a stage's runner and the stage disagree on a probe."""
    hidden = _check_read(runner, stage, stage.read, int8)
    _check_branch(runner, stage, int8)
    if stage.is_last:
        _compare(runner.next_byte([hidden])[0], stage.next_byte(hidden), stage, int8)


def _check_read(
    runner: BlockRunner | StageRunner, part: Block | PipelineStage, read: Callable[..., Tensor], int8: bool
) -> Tensor:
    """A few positions at once, then one more, which goes through the cache."""
    generator = torch.Generator().manual_seed(0)
    a = part.architecture
    count = min(POSITIONS, a.positions)
    source = _source(part, (count,), generator)
    caches = new_caches(len(part.layers), a, count)
    expected = copy.deepcopy(caches)
    for piece in (source[:-1], source[-1:]):
        (features,) = runner.read([CleanPiece(piece, caches)])
        _compare(features, read(piece[None], expected)[0], part, int8)
    return features


def _check_branch(runner: StageRunner, stage: PipelineStage, int8: bool) -> None:
    """Branches of a sequence, against each of them read after it."""
    generator = torch.Generator().manual_seed(1)
    a = stage.architecture
    half = min(POSITIONS, a.positions) // 2
    source = _source(stage, (BRANCHES, half), generator)
    caches = new_caches(len(stage.layers), a, 2 * half)
    for cache in caches:
        cache.append(*torch.randn(2, *cache.keys[:, :, :half].shape, generator=generator))
    (hidden,) = runner.branch([BranchPiece(source, caches)])
    for found, branch in zip(hidden, source, strict=True):
        _compare(found, stage.read(branch[None], copy.deepcopy(caches))[0], stage, int8)


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
