"""The AR pipeline's model: the same layers, trained end to end, cut into contiguous stages."""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from stages.model.architecture import Architecture
from stages.model.layers import CausalStage, Layer, LayerCache, initialise, rotary_table


class ArStage(CausalStage):
    """One stage of a model that was trained here."""

    layers: Sequence[Layer]

    def __init__(self, architecture: Architecture, index: int) -> None:
        super().__init__()
        a = architecture
        self.architecture, self.index = a, index
        self.is_first, self.is_last = index == 0, index == a.parts - 1
        self.embedding = nn.Embedding(a.vocabulary, a.width) if self.is_first else None
        self.layers = cast(Sequence[Layer], nn.ModuleList(Layer(a.width, a.heads) for _ in range(a.layers)))
        self.norm = nn.RMSNorm(a.width) if self.is_last else None
        self.head = nn.Linear(a.width, a.vocabulary) if self.is_last else None
        self.register_buffer("rotary", rotary_table(a.context_length, a.head_dim), persistent=False)
        initialise(self, a.layers * a.parts)

    def restore_tables(self) -> None:
        """Compute what is not stored, for a stage that was built on the meta device."""
        self.rotary = rotary_table(self.architecture.context_length, self.architecture.head_dim)


class ArModel(nn.Module):
    """All stages in one process: what training and the local baseline use."""

    stages: Sequence[ArStage]

    def __init__(self, architecture: Architecture, stages: Sequence[ArStage] | None = None) -> None:
        """:param stages: those of a loaded model; new ones if not given."""
        super().__init__()
        self.architecture = architecture
        stages = stages or [ArStage(architecture, i) for i in range(architecture.parts)]
        self.stages = cast(Sequence[ArStage], nn.ModuleList(stages))

    def forward(self, source: Tensor, caches: list[list[LayerCache]] | None = None) -> Tensor:
        """Next-symbol logits (batch, positions, vocabulary) for symbols (batch, positions)."""
        x = source
        for i, stage in enumerate(self.stages):
            x = stage.read(x, caches[i] if caches else None)
        return self.stages[-1].next_byte(x)


class CacheShape(Protocol):
    """Facts of an architecture that size its caches."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def new_caches(
    layers: int, architecture: CacheShape, capacity: int, batch: int = 1, device: torch.device | None = None
) -> list[LayerCache]:
    """Empty KV caches of `layers` layers for `capacity` clean positions."""
    shape = (batch, architecture.kv_heads, capacity, architecture.head_dim)
    return [LayerCache(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(layers)]


def cache_bytes(layers: int, architecture: CacheShape, capacity: int) -> int:
    """Bytes that `new_caches` takes for one sequence."""
    return layers * 2 * capacity * architecture.kv_heads * architecture.head_dim * 4
