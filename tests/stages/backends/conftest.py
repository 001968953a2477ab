"""Pieces of requests, with caches that hold something."""

from collections.abc import Callable

import pytest
import torch

from onesweep.stages.backends.base import BranchPiece, CleanPiece, NoisyPiece
from onesweep.stages.model.architecture import VOCABULARY
from onesweep.stages.model.block import Block
from onesweep.stages.model.layers import LayerCache
from onesweep.stages.model.pipeline import ArStage, new_caches


def filled(part: Block | ArStage, past: int, room: int, generator: torch.Generator) -> list[LayerCache]:
    caches = new_caches(part.architecture.layers, part.architecture, past + room)
    for cache in caches:
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
        cache.length = past
    return caches


@pytest.fixture(scope="session")
def clean_piece() -> Callable[..., CleanPiece]:
    """A function of (part, new positions, past positions, seed): equal arguments give equal pieces."""

    def make(part: Block | ArStage, new: int, past: int = 0, seed: int = 0, room: int = 3) -> CleanPiece:
        generator = torch.Generator().manual_seed(seed)
        if part.embedding is None:
            source = torch.randn(new, part.architecture.width, generator=generator)
        else:
            source = torch.randint(VOCABULARY, (new,), generator=generator)
        return CleanPiece(source, filled(part, past, new + room, generator))

    return make


@pytest.fixture(scope="session")
def branch_piece() -> Callable[..., BranchPiece]:
    """A function of (stage, branches, positions, past positions, seed)."""

    def make(stage: ArStage, branches: int, positions: int, past: int, seed: int = 0) -> BranchPiece:
        generator = torch.Generator().manual_seed(seed)
        if stage.embedding is None:
            source = torch.randn(branches, positions, stage.architecture.width, generator=generator)
        else:
            source = torch.randint(VOCABULARY, (branches, positions), generator=generator)
        return BranchPiece(source, filled(stage, past, positions, generator))

    return make


@pytest.fixture(scope="session")
def noisy_piece() -> Callable[..., NoisyPiece]:
    """A function of (block, slots, sigma, start, seed)."""

    def make(
        block: Block, slots: int, sigma: float = 1.0, start: int = 0, temperature: float = 1.0, seed: int = 0
    ) -> NoisyPiece:
        generator = torch.Generator().manual_seed(seed)
        z, estimate = torch.randn(2, slots, block.architecture.code_dim, generator=generator)
        return NoisyPiece(z, estimate, sigma, start, filled(block, start, 3, generator), temperature)

    return make
