"""A model that draws: its shape, and one part of it, a block with a noise range or a stage of an undivided net."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.errors import ShapeError
from stages.model.architecture import MAX_LAYERS, SHAPE
from stages.model.block import FOURIER_FEATURES, noise_frequencies
from stages.settings import check, limits

FAMILY = "picture"
# Standard deviation of what the net sees: c_skip, c_out and the usual noise prior are made for it (EDM, arXiv
# 2206.00364).
DATA_STD = 0.5
MAX_SIDE, MAX_CHANNELS, MAX_TOKENS, MAX_CLASSES = 1024, 4, 4096, 10_000
MAX_CLASS_NAME = 64
_SIDE, _COUNT, _WIDTH = (limits(least=1, most=most) for most in (MAX_SIDE, 1 << 10, 1 << 14))


@dataclass(frozen=True)
class PictureArchitecture:
    """Sizes shared by all blocks of a chain that draws, or by all stages of an undivided net (DiT, arXiv 2212.09748).

    `parts` counts blocks or stages, `layers` transformer layers in *one* of them; `features` is the net's width.
    """

    height: int = field(metadata=_SIDE)
    width: int = field(metadata=_SIDE)
    channels: int = field(metadata=limits(least=1, most=MAX_CHANNELS))
    classes: tuple[str, ...]
    # A patch is a row on the wire, with a scale of its own: larger ones cost fewer bytes and see less detail.
    patch: int = field(default=4, metadata=_SIDE)
    parts: int = field(default=3, metadata=_COUNT)
    layers: int = field(default=2, metadata=_COUNT)
    features: int = field(default=96, metadata=_WIDTH)
    heads: int = field(default=4, metadata=_COUNT)
    condition_dim: int = field(default=96, metadata=_WIDTH)
    # Of the training pixels, which are 0 to 1: the net sees pixels of mean 0 and standard deviation DATA_STD.
    mean: float = field(default=0.5, metadata=limits(least=0, most=1))
    deviation: float = field(default=0.25, metadata=limits(least=1e-3, most=1))
    # The other architectures of a manifest are told apart by it.
    family: str = FAMILY  # what a manifest says of its kind of model

    def __post_init__(self) -> None:
        if self.family != FAMILY:
            raise ShapeError(f"architecture: family {self.family!r} is not {FAMILY!r}")
        check(self, ShapeError, SHAPE)
        if self.parts * self.layers > MAX_LAYERS:
            raise ShapeError(f"architecture: {self.parts * self.layers} layers; at most {MAX_LAYERS} are read")
        if self.height % self.patch or self.width % self.patch:
            raise ShapeError(f"architecture: {self.height} x {self.width} pixels are not whole patches of {self.patch}")
        if self.tokens > MAX_TOKENS:
            raise ShapeError(f"architecture: {self.tokens} patches in a picture; at most {MAX_TOKENS}: raise patch")
        if self.features % self.heads:
            raise ShapeError(f"architecture: features {self.features} must be a multiple of heads {self.heads}")
        if not 1 <= len(self.classes) <= MAX_CLASSES or len(set(self.classes)) != len(self.classes):
            raise ShapeError(f"architecture: needs 1 to {MAX_CLASSES} classes of different names")
        for name in self.classes:
            if not 0 < len(name) <= MAX_CLASS_NAME or not name.isprintable():
                raise ShapeError(f"architecture: a class needs a printable name of at most {MAX_CLASS_NAME} characters")

    @property
    def tokens(self) -> int:
        """Patches of a picture."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def patch_dim(self) -> int:
        """Numbers in a patch."""
        return self.patch * self.patch * self.channels

    @property
    def limit(self) -> float:
        """Largest magnitude of a number of a picture as the net sees it."""
        low, high = self.bounds
        return max(-low, high)

    @property
    def bounds(self) -> tuple[float, float]:
        """Black and white as the net sees them."""
        scale = DATA_STD / self.deviation
        return -self.mean * scale, (1 - self.mean) * scale

    def to_rows(self, pixels: Tensor) -> Tensor:
        """Patches of pictures as the net sees them: (pictures, tokens, patch_dim) float32.

        pixels: (pictures, channels, height, width) uint8.
        """
        p, n = self.patch, pixels.shape[0]
        y = (pixels.float() / 255 - self.mean) * (DATA_STD / self.deviation)
        y = y.view(n, self.channels, self.height // p, p, self.width // p, p)
        return y.permute(0, 2, 4, 1, 3, 5).reshape(n, self.tokens, self.patch_dim)

    def to_pixels(self, rows: Tensor) -> Tensor:
        """The reverse: (pictures, channels, height, width) uint8, from (pictures, tokens, patch_dim)."""
        p, n = self.patch, rows.shape[0]
        y = rows.view(n, self.height // p, self.width // p, self.channels, p, p).permute(0, 3, 1, 4, 2, 5)
        y = y.reshape(n, self.channels, self.height, self.width)
        return ((y * (self.deviation / DATA_STD) + self.mean) * 255).round().clamp(0, 255).to(torch.uint8)


# `chain`: blocks, each with a way in and a head of its own. `steps`: stages that are cut from one net.
PictureKind = Literal["chain", "steps"]


def skip_scale(sigma: float) -> float:
    """c_skip of EDM (arXiv 2206.00364, table 1)."""
    return DATA_STD**2 / (sigma**2 + DATA_STD**2)


def out_scale(sigma: float) -> float:
    """c_out."""
    return sigma * DATA_STD / math.sqrt(sigma**2 + DATA_STD**2)


def in_scale(sigma: float) -> float:
    """c_in: makes the state's variance 1."""
    return 1 / math.sqrt(sigma**2 + DATA_STD**2)


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
    """Layer norm without weights, which the modulation brings."""
    return F.layer_norm(x, x.shape[-1:])


class PicturePart(nn.Module):
    """Layers of one part with all that its host needs.

    A part that `reads_patches` takes noisy patches, the others hidden states; one that `has_head` gives F, from which
    the denoised picture is D = c_skip z + c_out F, the others hidden states.
    """

    layers: Sequence[DitLayer]
    frequencies: Tensor

    def __init__(self, architecture: PictureArchitecture, index: int, kind: PictureKind) -> None:
        super().__init__()
        a = architecture
        self.architecture, self.index, self.kind = a, index, kind
        self.reads_patches = kind != "steps" or index == 0
        self.has_head = kind != "steps" or index == a.parts - 1
        # Blocks share nothing, not even tables: training one needs no other, and a host holds one file.
        self.patch_in = nn.Linear(a.patch_dim, a.features) if self.reads_patches else None
        self.positions = nn.Parameter(torch.zeros(a.tokens, a.features)) if self.reads_patches else None
        # Row `len(classes)` stands for no class: guidance needs it.
        self.classes = nn.Embedding(len(a.classes) + 1, a.condition_dim)
        self.noise_in = nn.Linear(2 * FOURIER_FEATURES, a.condition_dim)
        self.noise_out = nn.Linear(a.condition_dim, a.condition_dim)
        # A stage of an undivided net has a condition of its own, too: passed on, it would be more bytes on every hop.
        layers = (DitLayer(a.features, a.heads, a.condition_dim) for _ in range(a.layers))
        self.layers = cast(Sequence[DitLayer], nn.ModuleList(layers))
        self.head_modulation = nn.Linear(a.condition_dim, 2 * a.features) if self.has_head else None
        self.head = nn.Linear(a.features, a.patch_dim) if self.has_head else None
        self.register_buffer("frequencies", noise_frequencies(), persistent=False)
        self._initialise()

    def restore_tables(self) -> None:
        """Compute what is not stored, for a part that was built on the meta device."""
        self.frequencies = noise_frequencies()

    def condition(self, sigma: Tensor, classes: Tensor) -> Tensor:
        """(pictures, condition_dim), from sigma (pictures,) and classes (pictures,) int64."""
        angle = (sigma.log() / 4)[:, None] * self.frequencies
        noise = F.silu(self.noise_in(torch.cat([angle.cos(), angle.sin()], dim=-1)))
        return F.silu(self.noise_out(noise) + self.classes(classes))

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> Tensor:
        """F (pictures, tokens, patch_dim), or hidden states (pictures, tokens, features).

        x: c_in z (pictures, tokens, patch_dim), or the hidden states of the stage before.
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
        """Layers begin as the identity and the head at 0 (AdaLN-Zero); positions small."""
        for name, parameter in self.named_parameters():
            zero = name.endswith(".bias") or "modulation" in name or name == "head.weight"
            if zero:
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                fan_in = name.endswith(".weight") and name != "classes.weight"
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 if fan_in else 0.02)
