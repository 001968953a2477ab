"""A local AR model that reads something beside the text: deep features, or a plan of the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from stages.ar import ArStage
from stages.layers import LayerCache, initialise, rotary_table, rotate


@dataclass(frozen=True)
class Guide:
    """What is read, lined up with the bytes that are to be written: byte p + 1 after position p.

    memory: (batch, entries, dim), entry 0 belongs to position `start`; visible: bool (batch or 1, positions, entries);
    nearest: (batch, positions, dim), the entry that says most about the byte, zero where there is none.
    """

    memory: Tensor
    visible: Tensor
    nearest: Tensor
    start: int = 0


class Reading(nn.Module):
    """Attention to a guide's memory, and to a nothing of zeros that is always there."""

    def __init__(self, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(dim, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, guide: Guide, rotary: Tensor, past: int) -> Tensor:
        """x: (batch, positions, width), the first one at position `past`."""
        entries = guide.memory.shape[1]
        query = self._split(self.query(self.norm(x)))
        key, value = (self._split(part) for part in self.key_value(guide.memory).chunk(2, dim=-1))
        # a query stands where its byte will
        query = rotate(query, rotary[:, past + 1 : past + 1 + x.shape[1]])
        key = rotate(key, rotary[:, guide.start : guide.start + entries])
        visible = F.pad(guide.visible, (1, 0), value=True)[:, None]
        mixed = F.scaled_dot_product_attention(
            query, F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0)), attn_mask=visible
        )
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def _split(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        return x.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)


class GuidedLocal(nn.Module):
    """An AR model of one stage. Without a guide, and at the start with one, it is that stage."""

    reading_layers: Sequence[Reading]
    rotary: Tensor

    def __init__(self, stage: ArStage, dim: int) -> None:
        """:param dim: of an entry of the guide's memory."""
        super().__init__()
        a = stage.architecture
        self.stage = stage
        self.reading_layers = cast(
            Sequence[Reading], nn.ModuleList(Reading(a.width, a.heads, dim) for _ in range(a.layers))
        )
        self.beside = nn.Linear(dim, a.width, bias=False)
        self.register_buffer("rotary", rotary_table(a.context_bytes + 1, a.head_dim), persistent=False)
        for reading in self.reading_layers:
            initialise(reading, a.layers)
            nn.init.zeros_(reading.out.weight)
        nn.init.zeros_(self.beside.weight)

    def forward(self, source: Tensor, guide: Guide | None = None, caches: list[LayerCache] | None = None) -> Tensor:
        """Next-byte logits (batch, positions, 256) for bytes (batch, positions) that follow those in `caches`."""
        assert self.stage.embedding is not None
        past = caches[0].length if caches else 0
        x = self.stage.embedding(source)
        if guide is not None:
            x = x + self.beside(guide.nearest)
        own = self.stage.rotary[:, past : past + x.shape[1]]
        for i, (layer, reading) in enumerate(zip(self.stage.layers, self.reading_layers, strict=True)):
            if guide is not None:
                x = x + reading(x, guide, self.rotary, past)
            x, _, _ = layer.clean(x, own, caches[i] if caches else None)
        return self.stage.next_byte(x)
