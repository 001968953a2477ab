"""One part of a picture model: a block with a noise range, or a stage of an undivided net."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.architecture import PictureArchitecture
from stages.model.block import FOURIER_FEATURES, noise_frequencies
from stages.model.layers import listed

# `chain`: blocks, each with its own input layer and head. `steps`: stages cut from one net.
PictureKind = Literal["chain", "steps"]


class DitLayer(nn.Module):
    """Attention among a picture's patches and an MLP, modulated by noise level and class (AdaLN-Zero)."""

    def __init__(self, features: int, heads: int, condition_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features)
        self.attention_out = nn.Linear(features, features)
        self.mlp_in = nn.Linear(features, 4 * features)
        self.mlp_out = nn.Linear(4 * features, features)
        self.modulation = nn.Linear(condition_dim, 6 * features)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: (pictures, tokens, features); condition: (pictures, condition_dim)."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)[:, None].chunk(6, dim=-1)
        n, tokens, width = x.shape
        qkv = self.qkv(normed(x) * (1 + scale_a) + shift_a).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + gate_a * self.attention_out(mixed.transpose(1, 2).reshape(n, tokens, width))
        hidden = F.gelu(self.mlp_in(normed(x) * (1 + scale_m) + shift_m))
        return x + gate_m * self.mlp_out(hidden)


def normed(x: Tensor) -> Tensor:
    """Layer norm without weights; the modulation supplies them."""
    return F.layer_norm(x, x.shape[-1:])


class PicturePart(nn.Module):
    """Layers of one part with everything that its host needs.

    A part that `reads_patches` takes noisy patches, the others take hidden states. A part that `has_head` returns F,
    from which the denoised picture is D = c_skip z + c_out F; the others return hidden states.
    """

    layers: Sequence[DitLayer]
    frequencies: Tensor

    def __init__(self, architecture: PictureArchitecture, index: int, kind: PictureKind) -> None:
        super().__init__()
        a = architecture
        self.architecture, self.index, self.kind = a, index, kind
        self.reads_patches = kind != "steps" or index == 0
        self.has_head = kind != "steps" or index == a.parts - 1
        # Blocks share nothing, not even tables: one can be trained without the others, and a host holds one file.
        self.patch_in = nn.Linear(a.patch_dim, a.features) if self.reads_patches else None
        self.positions = nn.Parameter(torch.zeros(a.tokens, a.features)) if self.reads_patches else None
        # Row `len(classes)` stands for no class: guidance needs it.
        self.classes = nn.Embedding(len(a.classes) + 1, a.condition_dim)
        self.noise_in = nn.Linear(2 * FOURIER_FEATURES, a.condition_dim)
        self.noise_out = nn.Linear(a.condition_dim, a.condition_dim)
        # A stage of an undivided net has its own condition, too: sent along, it would add bytes to every hop.
        self.layers = listed(DitLayer(a.features, a.heads, a.condition_dim) for _ in range(a.layers))
        self.head_modulation = nn.Linear(a.condition_dim, 2 * a.features) if self.has_head else None
        self.head = nn.Linear(a.features, a.patch_dim) if self.has_head else None
        self.register_buffer("frequencies", noise_frequencies(), persistent=False)
        self._initialise()

    def restore_tables(self) -> None:
        """Compute the tables, which are not stored, for a part that was built on the meta device."""
        self.frequencies = noise_frequencies()

    def condition(self, sigma: Tensor, classes: Tensor) -> Tensor:
        """The condition (pictures, condition_dim), from sigma (pictures,) and classes (pictures,) int64."""
        angle = (sigma.log() / 4)[:, None] * self.frequencies
        noise = F.silu(self.noise_in(torch.cat([angle.cos(), angle.sin()], dim=-1)))
        return F.silu(self.noise_out(noise) + self.classes(classes))

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> Tensor:
        """F (pictures, tokens, patch_dim), or hidden states (pictures, tokens, features).

        x: c_in z (pictures, tokens, patch_dim), or hidden states from the stage before.
        """
        condition = self.condition(sigma, classes)
        if self.patch_in is not None:
            x = self.patch_in(x) + self.positions
        for layer in self.layers:
            x = layer(x, condition)
        if self.head is None:
            return x
        assert self.head_modulation is not None
        shift, scale = self.head_modulation(condition)[:, None].chunk(2, dim=-1)
        return self.head(normed(x) * (1 + scale) + shift)

    def _initialise(self) -> None:
        """Initialise layers to the identity and the head to 0 (AdaLN-Zero); positions to small numbers."""
        for name, parameter in self.named_parameters():
            zero = name.endswith(".bias") or "modulation" in name or name == "head.weight"
            if zero:
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                fan_in = name.endswith(".weight") and name != "classes.weight"
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 if fan_in else 0.02)
