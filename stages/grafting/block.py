"""A pretrained stage as a block: its clean stream as it is, and noisy slots through the same layers.

The model was trained to say at each position what comes next, so a slot for position p sits at position p - 1: it reads
what is known of the symbol there, and its odds are of the symbol after it (the shift of DiffuLLaMA, arXiv 2410.17891).
The first slot of a chunk reads a known symbol, and says at the start exactly what the pretrained model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stages.families import PipelineStage
from stages.grafting.head import Evidence, Head
from stages.grafting.slots import AnyLayer, Slots
from stages.layers import LayerCache

Memory = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Noisy:
    """Noisy slots at one moment."""

    z: Tensor
    """States of the slots' own symbols: (batch, slots, code_dim)."""
    estimate: Tensor
    """What was made of them before, zero for nothing: (batch, slots, code_dim)."""
    sigma: Tensor
    """(batch, slots or 1)"""
    first: Tensor
    """Which slots are the first of their chunk: (slots,) bool."""
    mask: Tensor | None = None
    """Additive, (slots, clean + slots); None: every slot sees all."""
    start: int = 0
    """Where the first slot sits: one before the position that it fills."""

    def guess(self) -> Tensor:
        """The posterior mean of each slot's code, were codes Gaussian around the estimate: (batch, slots, code_dim).

        Codes have norm 1, so an estimate E leaves a variance of (1 - |E|^2) / code_dim a number.
        """
        left = (1 - self.estimate.square().sum(dim=2, keepdim=True)).clamp_min(0) / self.z.shape[2]
        return self.estimate + left / (left + self.sigma[..., None] ** 2) * (self.z - self.estimate)

    def evidence(self) -> Evidence:
        """For the head: a row a slot."""
        return Evidence(self.z.flatten(0, 1), self.sigma.expand(self.z.shape[:2]).reshape(-1, 1))


class GraftBlock(nn.Module):
    """One stage of a pretrained model and what its noisy slots add."""

    def __init__(self, stage: PipelineStage, slots: Slots) -> None:
        super().__init__()
        self.stage, self.added, self.index = stage, slots, stage.index

    def read(self, source: Tensor, caches: Sequence[LayerCache] | None = None) -> tuple[Tensor, Memory]:
        """The clean stream: what the pretrained stage computes, and its layers' keys and values so far.

        source: symbols (batch, positions) int64 in block 0, else features (batch, positions, width), that come after
        what is in `caches`, and are appended to them.
        """
        stage = self.stage
        layers: Sequence[AnyLayer] = stage.layers
        x = stage.embedding(source) if stage.embedding is not None else source
        start = caches[0].length if caches else 0
        rotary, memory = stage.rotary[:, start : start + x.shape[1]], []
        for i, layer in enumerate(layers):
            x, keys, values = layer.clean(x, rotary, caches[i] if caches else None)
            memory.append((keys, values))
        return x, memory

    def enter(self, tokens: Tensor, first: Tensor) -> Tensor:
        """What block 0's slots begin with: the embeddings of known tokens, else zero: (batch, slots, width).

        tokens: those that slots read, (batch, slots) int64, of which only those at `first` count.
        """
        assert self.stage.embedding is not None, "only the first block has an embedding"
        return self.stage.embedding(tokens) * first[:, None]

    def denoise(self, before: Tensor, noisy: Noisy, memory: Memory) -> Tensor:
        """Features of the slots: (batch, slots, width).

        before: of the block before, or of `enter`: (batch, slots, width); memory: from `read`.
        """
        read = noisy.guess().roll(1, dims=1)  # a slot reads the symbol before its own
        x = before + self.added.state_in(read) * ~noisy.first[:, None]
        rotary = self.stage.rotary[:, noisy.start : noisy.start + x.shape[1]]
        condition = self.added.condition(noisy.sigma)
        for added, layer, stored in zip(self.added.layers, self.stage.layers, memory, strict=True):
            x = added(layer, x, condition, rotary, stored, noisy.mask)
        return x

    def point(self, features: Tensor, noisy: Noisy, head: Head, temperature: float = 1.0) -> Tensor:
        """Denoised points of the slots: (batch, slots, code_dim)."""
        hidden = self.added.way_out(features)
        return head.points(hidden.flatten(0, 1), noisy.evidence(), temperature).view(noisy.z.shape)


def first_of_chunks(chunks: Tensor) -> Tensor:
    """Which positions begin a chunk, from the chunk that each belongs to: (positions,) bool."""
    return torch.cat([torch.ones(1, dtype=torch.bool, device=chunks.device), chunks[1:] != chunks[:-1]])
