"""Transformer layers for a causal clean stream and, next to it, noisy slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.few_bits import Int8Embedding

M = TypeVar("M", bound=nn.Module)
Numbers = Any  # NDArray[np.float32] in the processor's memory, a Tensor on another device: both are assigned to alike


def rotary_table(positions: int, head_dim: int) -> Tensor:
    """cos and sin of rotary angles (RoPE, arXiv 2104.09864): (2, positions, head_dim / 2) float32."""
    if torch.get_default_device().type == "meta":  # nothing to compute, and powers would import torch's compiler
        return torch.empty(2, positions, head_dim // 2)
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()]).float()


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding. x: (..., positions, head_dim); rotary: (2, positions, head_dim / 2)."""
    cos, sin = rotary.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def seen_keys(new: int, past: int, window: int | None = None, device: torch.device | None = None) -> Tensor:
    """True if one of `new` positions after `past` others sees a key: (new, past + new) bool.

    :param window: positions that each one sees, including itself; None for all.
    """
    seen = torch.ones(new, past + new, dtype=torch.bool, device=device).tril(past)
    return seen if window is None else seen.triu(past - window + 1)


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    """Numbers squashed smoothly below `cap`, if there is one (Gemma 2, arXiv 2408.00118)."""
    return x if cap is None else (x / cap).tanh() * cap


@dataclass
class LayerCache:
    """Keys and values of one layer's clean positions: (batch, heads, capacity, head_dim), `length` in use."""

    keys: Tensor
    values: Tensor
    length: int = 0

    @cached_property
    def arrays(self) -> tuple[Numbers, Numbers]:
        """Keys and values of the first sequence as numpy arrays on the same memory: (heads, capacity, head_dim) each.
        On a device whose memory numpy cannot see, as tensors: assignment to parts is written alike."""
        return (self.keys.numpy()[0], self.values.numpy()[0]) if self.keys.is_cpu else (self.keys[0], self.values[0])

    @cached_property
    def by_head(self) -> tuple[Tensor, Tensor]:
        """The first sequence's keys (heads, head_dim, capacity) and values (heads, capacity, head_dim)."""
        return self.keys[0].transpose(1, 2), self.values[0]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions; return all keys and values so far."""
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.stored()

    def stored(self) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class CausalLayer(nn.Module):
    """Attention and MLP over a causal stream. A family defines the modules, the heads and the activation."""

    attention_norm: nn.RMSNorm | nn.Identity  # none if a family's norms come after, not before
    qkv: nn.Linear
    attention_out: nn.Linear
    mlp_norm: nn.RMSNorm | nn.Identity
    mlp_in: nn.Linear
    mlp_out: nn.Linear

    def clean(self, x: Tensor, rotary: Tensor, cache: LayerCache | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The causal stream. x: (batch, positions, width), positions following those in `cache`.

        Returns x and the keys and values of all clean positions so far: (batch, kv_heads, positions, head_dim).
        """
        q, k, v = self.by_head(self.qkv(self.attention_norm(x)), rotary)
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.append(k, v)
        x = x + self.out_of_heads(_join(self.attend(q, k, v, past)))
        return x + self.mlp(x), k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
        """Attention's result for each new position, by head: shaped as q."""
        new = q.shape[2]
        mask = seen_keys(new, past, device=q.device) if past and new > 1 else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=not past and new > 1, enable_gqa=q.shape[1] != k.shape[1]
        )

    def out_of_heads(self, mixed: Tensor) -> Tensor:
        """Attention's addition to the stream: (batch, positions, heads x head_dim) -> (batch, positions, width)."""
        return self.attention_out(mixed)

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP's addition to the stream: (..., width)."""
        raise NotImplementedError

    def by_head(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two rotated: (batch, heads or kv_heads, positions, head_dim) each, from
        (batch, positions, width of all three)."""
        raise NotImplementedError


class CausalStage(nn.Module):
    """One stage of a pipeline. The first stage embeds tokens, the last has the final norm and the next-token head."""

    embedding: nn.Embedding | Int8Embedding | None
    layers: Sequence[CausalLayer]
    norm: nn.RMSNorm | None
    head: nn.Linear | TiedHead | None
    rotary: Tensor

    def __init__(self, index: int, parts: int) -> None:
        super().__init__()
        self.index, self.is_first, self.is_last = index, index == 0, index == parts - 1

    def read(self, source: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """Run positions. source: tokens (batch, positions) int64 in the first stage, else hidden states (batch,
        positions, width). Returns hidden states."""
        x = self.embedding(source) if self.embedding is not None else source
        start = caches[0].length if caches else 0
        for i, layer in enumerate(self.layers):
            rotary = self.rotary_of(i)[:, start : start + x.shape[1]]
            x, _, _ = layer.clean(x, rotary, caches[i] if caches else None)
        return x

    def rotary_of(self, layer: int) -> Tensor:
        """cos and sin for one of this stage's layers: (2, positions, head_dim / 2)."""
        return self.rotary

    def next_byte(self, hidden: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the next token; the last stage only."""
        assert self.norm is not None, "only the last stage has a head"
        assert self.head is not None
        return self.head(self.norm(hidden))


class Layer(CausalLayer):
    """A layer of a byte model. Noisy slots go through the same weights, modulated by AdaLN on sigma."""

    attention_norm: nn.RMSNorm
    mlp_norm: nn.RMSNorm

    def __init__(self, width: int, heads: int, condition_dim: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.modulation = nn.Linear(condition_dim, 6 * width) if condition_dim else None

    def noisy(
        self, x: Tensor, condition: Tensor, rotary: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Noisy slots: each sees the clean `keys` and every slot, unless `mask` (bool or additive) says otherwise.

        x: (batch, slots, width); condition: (batch, slots or 1, condition_dim);
        keys, values: (batch, heads, clean, head_dim); mask: (slots, clean + slots).
        """
        assert self.modulation is not None, "a layer of an AR model has no noisy slots"
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).chunk(6, dim=-1)
        q, k, v = self.by_head(self.qkv(self.attention_norm(x) * (1 + scale_a) + shift_a), rotary)
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + (1 + gate_a) * self.attention_out(_join(mixed))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x) * (1 + scale_m) + shift_m))
        return x + (1 + gate_m) * self.mlp_out(hidden)

    def by_head(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, positions, width = qkv.shape
        parts = qkv.view(batch, positions, 3, self.heads, width // (3 * self.heads)).permute(2, 0, 3, 1, 4)
        q, k = rotate(parts[:2], rotary)
        return q, k, parts[2]

    def mlp(self, x: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def _join(x: Tensor) -> Tensor:
    batch, heads, positions, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, positions, heads * head_dim)


def listed(modules: Iterable[M]) -> Sequence[M]:
    """An nn.ModuleList, with the type of its modules."""
    return cast(Sequence[M], nn.ModuleList(modules))


def initialise(module: nn.Module, layers: int) -> None:
    """Normal(0, 0.02) weights, residual outputs scaled by 1/sqrt(2 layers) (GPT-2); AdaLN starts as identity."""
    for name, parameter in module.named_parameters():
        if ".modulation." in name or name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() >= 2:
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)


# A head without weights of its own.
class TiedHead(nn.Module):
    """Multiplies with the embedding of the same stage, wherever that is moved or loaded: one matrix, stored once."""

    bias: None = None

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.__dict__["_embedding"] = embedding  # not as a submodule: the weights are the stage's

    @property
    def weight(self) -> Tensor:
        """(vocabulary, width)"""
        embedding: nn.Embedding = self.__dict__["_embedding"]
        return embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width) -> logits (..., vocabulary)."""
        return F.linear(x, self.weight)
