"""Layers of the Llama family and a stage of them: what the backends compute, in its plainest form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.layers import LayerCache, initialise, rotate
from stages.llama.architecture import LlamaArchitecture
from stages.llama.rotary import llama_rotary
from stages.tied_head import TiedHead


class LlamaLayer(nn.Module):
    """Grouped-query attention and SwiGLU (arXiv 2305.13245, 2002.05202), each behind an RMSNorm.

    Rotary embedding in the half-split form: number i of a head is paired with number i + head_dim / 2.
    """

    def __init__(self, architecture: LlamaArchitecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.attention_norm = nn.RMSNorm(a.width, eps=a.norm_epsilon)
        self.qkv = nn.Linear(a.width, a.qkv_width, bias=a.attention_bias != "none")
        self.attention_out = nn.Linear(a.query_width, a.width, bias=a.attention_bias == "all")
        self.mlp_norm = nn.RMSNorm(a.width, eps=a.norm_epsilon)
        self.mlp_in = nn.Linear(a.width, 2 * a.mlp_width, bias=False)  # the gate's rows, then those it multiplies
        self.mlp_out = nn.Linear(a.mlp_width, a.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: LayerCache | None = None) -> Tensor:
        """x: (batch, positions, width), positions following those in `cache`."""
        return self.clean(x, rotary, cache)[0]

    def clean(self, x: Tensor, rotary: Tensor, cache: LayerCache | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `forward`; also the keys and values of all positions so far: (batch, kv_heads, positions, head_dim)."""
        q, k, v = self.by_head(self.qkv(self.attention_norm(x)), rotary)
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.append(k, v)
        new = q.shape[2]
        mask = None
        if past and new > 1:
            mask = torch.ones(new, past + new, dtype=torch.bool, device=x.device).tril(past)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=not past and new > 1, enable_gqa=q.shape[1] != k.shape[1]
        )
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(self.activate(self.mlp_in(self.mlp_norm(x)))), k, v

    def by_head(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two rotated: (batch, heads or kv_heads, positions, head_dim) each, from
        (batch, positions, qkv_width)."""
        a = self.architecture
        by_head = qkv.unflatten(2, (-1, a.head_dim)).transpose(1, 2)
        q, k, v = by_head.split([a.heads, a.kv_heads, a.kv_heads], dim=1)
        return rotate(q, rotary), rotate(k, rotary), v

    def activate(self, hidden: Tensor) -> Tensor:
        """What is between the MLP's two products."""
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up


class LlamaStage(nn.Module):
    """Layers of one stage. The first stage embeds tokens, the last has the final norm and the next-token head."""

    layers: Sequence[LlamaLayer]
    rotary: Tensor

    def __init__(self, architecture: LlamaArchitecture, index: int) -> None:
        super().__init__()
        a = architecture
        self.architecture, self.index = a, index
        self.is_first, self.is_last = index == 0, index == a.parts - 1
        self.embedding = nn.Embedding(a.vocabulary, a.width) if self.is_first else None
        self.layers = cast(Sequence[LlamaLayer], nn.ModuleList(LlamaLayer(a) for _ in range(a.layers_in(index))))
        self.norm = nn.RMSNorm(a.width, eps=a.norm_epsilon) if self.is_last else None
        self.head = self._new_head() if self.is_last else None
        self.register_buffer("rotary", llama_rotary(a), persistent=False)
        initialise(self, sum(a.layers))

    def _new_head(self) -> nn.Linear | TiedHead:
        a = self.architecture
        if a.tied_head and self.embedding is not None:
            return TiedHead(self.embedding)
        return nn.Linear(a.width, a.vocabulary, bias=False)

    def restore_tables(self) -> None:
        """Compute what is not stored, for a stage that was built on the meta device."""
        self.rotary = llama_rotary(self.architecture)

    def read(self, source: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """Run positions. source: tokens (batch, positions) int64 in the first stage, else hidden states
        (batch, positions, width), which is also what comes back."""
        x = self.embedding(source) if self.embedding is not None else source
        start = caches[0].length if caches else 0
        rotary = self.rotary[:, start : start + x.shape[1]]
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, caches[i] if caches else None)
        return x

    def next_byte(self, hidden: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the next token; the last stage only."""
        assert self.norm is not None, "only the last stage has a head"
        assert self.head is not None
        return self.head(self.norm(hidden))
