"""Pieces of requests, with caches that hold something."""

import torch

from stages.backends.base import BranchPiece, CleanPiece, NoisyPiece
from stages.model.architecture import VOCABULARY
from stages.model.block import Block
from stages.model.layers import LayerCache
from stages.model.pipeline import ArStage, new_caches


def filled(part: Block | ArStage, past: int, room: int, generator: torch.Generator) -> list[LayerCache]:
    caches = new_caches(part.architecture.layers, part.architecture, past + room)
    for cache in caches:
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
        cache.length = past
    return caches


def clean_piece(part: Block | ArStage, new: int, past: int = 0, seed: int = 0, room: int = 3) -> CleanPiece:
    """New positions after `past` ones in the caches: equal arguments give equal pieces."""
    generator = torch.Generator().manual_seed(seed)
    if part.embedding is None:
        source = torch.randn(new, part.architecture.width, generator=generator)
    else:
        source = torch.randint(VOCABULARY, (new,), generator=generator)
    return CleanPiece(source, filled(part, past, new + room, generator))


def branch_piece(stage: ArStage, branches: int, positions: int, past: int, seed: int = 0) -> BranchPiece:
    """Branches of so many positions, after `past` ones in the caches."""
    generator = torch.Generator().manual_seed(seed)
    if stage.embedding is None:
        source = torch.randn(branches, positions, stage.architecture.width, generator=generator)
    else:
        source = torch.randint(VOCABULARY, (branches, positions), generator=generator)
    return BranchPiece(source, filled(stage, past, positions, generator))


def noisy_piece(
    block: Block, slots: int, sigma: float = 1.0, start: int = 0, temperature: float = 1.0, seed: int = 0
) -> NoisyPiece:
    """Slots after `start` positions in the caches."""
    generator = torch.Generator().manual_seed(seed)
    z, estimate = torch.randn(2, slots, block.architecture.code_dim, generator=generator)
    return NoisyPiece(z, estimate, sigma, start, filled(block, start, 3, generator), temperature)
