"""Pieces of requests, with caches that hold something: equal arguments give equal pieces."""

import torch

from stages.backends import runner_checks
from stages.backends.base import BranchPiece, CleanPiece, NoisyPiece
from stages.backends.runner_checks import caches_of, source_of
from stages.model.block import Block
from stages.model.pipeline import PipelineStage


def clean_piece(part: Block | PipelineStage, new: int, past: int = 0, seed: int = 0, room: int = 3) -> CleanPiece:
    """New positions after `past` ones in the caches."""
    return runner_checks.clean_piece(part, new, past, torch.Generator().manual_seed(seed), room)


def branch_piece(stage: PipelineStage, branches: int, positions: int, past: int, seed: int = 0) -> BranchPiece:
    """Branches of so many positions, after `past` ones in the caches."""
    generator = torch.Generator().manual_seed(seed)
    source = source_of(stage, (branches, positions), generator)
    return BranchPiece(source, caches_of(stage, past, positions, generator))


def noisy_piece(
    block: Block, slots: int, sigma: float = 1.0, start: int = 0, temperature: float = 1.0, seed: int = 0
) -> NoisyPiece:
    """Slots after `start` positions in the caches."""
    generator = torch.Generator().manual_seed(seed)
    z, estimate = torch.randn(2, slots, block.architecture.code_dim, generator=generator)
    return NoisyPiece(z, estimate, sigma, start, caches_of(block, start, 3, generator), temperature)
