"""What noisy slots have of their own in a pretrained block: everything that may be trained while its weights stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.families import PipelineStage
from stages.grafting.architecture import Shape
from stages.layers import Layer, NoiseCondition, noise_frequencies
from stages.llama.stage import LlamaLayer

AnyLayer = Layer | LlamaLayer

PRODUCTS = ("qkv", "attention_out", "mlp_in", "mlp_out")


class LowRank(nn.Module):
    """An update of a frozen product, zero at the start (LoRA, arXiv 2106.09685)."""

    def __init__(self, product: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(product.in_features, rank, bias=False)
        self.up = nn.Linear(rank, product.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=product.in_features**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class SlotLayer(nn.Module):
    """What a layer does otherwise for noisy slots: AdaLN on sigma, and low-rank updates. At the start, nothing."""

    def __init__(self, layer: AnyLayer, shape: Shape) -> None:
        super().__init__()
        self.modulation = nn.Linear(shape.condition_dim, 6 * layer.qkv.in_features)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        updates = {name: LowRank(getattr(layer, name), shape.rank) for name in PRODUCTS if shape.rank}
        self.updates = nn.ModuleDict(updates)

    def forward(
        self,
        layer: AnyLayer,
        x: Tensor,
        condition: Tensor,
        rotary: Tensor,
        memory: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Noisy slots through `layer`.

        x: (batch, slots, width); condition: (batch, slots or 1, condition_dim); memory: keys and values of clean
        positions; mask: additive, (slots, clean + slots), or None where every slot sees all.
        """
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).chunk(6, dim=-1)
        q, k, v = layer.by_head(self._product(layer, "qkv", layer.attention_norm(x) * (1 + scale_a) + shift_a), rotary)
        keys, values = (torch.cat([old.to(new.dtype), new], dim=2) for old, new in zip(memory, (k, v), strict=True))
        mask = None if mask is None else mask.to(q.dtype)
        grouped = q.shape[1] != keys.shape[1]
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
        x = x + (1 + gate_a) * self._product(layer, "attention_out", mixed.transpose(1, 2).flatten(2))
        hidden = self._product(layer, "mlp_in", layer.mlp_norm(x) * (1 + scale_m) + shift_m)
        return x + (1 + gate_m) * self._product(layer, "mlp_out", layer.activate(hidden))

    def _product(self, layer: AnyLayer, name: str, x: Tensor) -> Tensor:
        out: Tensor = getattr(layer, name)(x)
        return out + self.updates[name](x) if name in self.updates else out


class Slots(nn.Module):
    """All of a block's: the way in from codes, the layers', and the way out to the head's space.

    What it adds to a pretrained block is nothing at the start, but in block 0, where codes take the place of the
    embeddings of what is not known yet.
    """

    layers: Sequence[SlotLayer]

    def __init__(self, stage: PipelineStage, shape: Shape) -> None:
        super().__init__()
        width = stage.architecture.width
        self.condition = NoiseCondition(shape.condition_dim)
        self.state_in = nn.Linear(shape.code_dim, width)
        nn.init.zeros_(self.state_in.weight)
        nn.init.zeros_(self.state_in.bias)
        layers = nn.ModuleList(SlotLayer(layer, shape) for layer in stage.layers)
        self.layers = cast(Sequence[SlotLayer], layers)
        self.way_out = WayOut(width, stage.layers[0].attention_norm.eps)

    def restore_tables(self) -> None:
        """Compute what is not stored, for slots that were built on the meta device."""
        self.condition.frequencies = noise_frequencies()

    @torch.no_grad()
    def begin(self, norm: nn.RMSNorm, lens: Tensor, decoding: tuple[Tensor, Tensor] | None) -> None:
        """What training starts from.

        :param norm: the model's final one.
        :param lens: from a block's features to the model's last, (width, width + 1): a matrix and an offset.
        :param decoding: of block 0, from codes to the embeddings that they stand for: (width, code_dim) and (width,).
        """
        self.way_out.norm.load_state_dict(norm.state_dict())
        self.way_out.lens.weight.copy_(lens[:, :-1])
        self.way_out.lens.bias.copy_(lens[:, -1])
        if decoding is not None:
            self.state_in.weight.copy_(decoding[0])
            self.state_in.bias.copy_(decoding[1])


class WayOut(nn.Module):
    """From features in the middle of a model to those that its head reads, one translation (the tuned lens, arXiv
    2303.08112), and the final norm; at the start the norm alone."""

    def __init__(self, width: int, epsilon: float | None) -> None:
        super().__init__()
        self.lens = nn.Linear(width, width)
        nn.init.zeros_(self.lens.weight)
        nn.init.zeros_(self.lens.bias)
        self.norm = nn.RMSNorm(width, eps=epsilon)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(features + self.lens(features))
