"""The shape of a model that draws: the pictures' size, their classes, and the transformer over their patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.errors import ShapeError
from stages.model.architecture import MAX_LAYERS, check_whole

FAMILY = "picture"
# Standard deviation of what the net sees: c_skip, c_out and the usual noise prior are made for it (EDM, arXiv
# 2206.00364).
DATA_STD = 0.5
MAX_SIDE, MAX_CHANNELS, MAX_TOKENS, MAX_CLASSES = 1024, 4, 4096, 10_000
MAX_CLASS_NAME = 64


@dataclass(frozen=True)
class PictureArchitecture:
    """Sizes shared by all blocks of a chain that draws, or by all stages of an undivided net (DiT, arXiv 2212.09748).

    `parts` counts blocks or stages, `layers` transformer layers in *one* of them; `features` is the net's width.
    """

    height: int
    width: int
    channels: int
    classes: tuple[str, ...]
    # A patch is a row on the wire, with a scale of its own: larger ones cost fewer bytes and see less detail.
    patch: int = 4
    parts: int = 3
    layers: int = 2
    features: int = 96
    heads: int = 4
    condition_dim: int = 96
    # Of the training pixels, which are 0 to 1: the net sees pixels of mean 0 and standard deviation DATA_STD.
    mean: float = 0.5
    deviation: float = 0.25
    # The other architectures of a manifest are told apart by it.
    family: str = FAMILY  # what a manifest says of its kind of model

    def __post_init__(self) -> None:
        if self.family != FAMILY:
            raise ShapeError(f"architecture: family {self.family!r} is not {FAMILY!r}")
        for name, most in (
            ("height", MAX_SIDE),
            ("width", MAX_SIDE),
            ("channels", MAX_CHANNELS),
            ("patch", MAX_SIDE),
            ("parts", 1 << 10),
            ("layers", 1 << 10),
            ("features", 1 << 14),
            ("heads", 1 << 10),
            ("condition_dim", 1 << 14),
        ):
            check_whole(name, getattr(self, name), 1, most)
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
            if not isinstance(name, str) or not 0 < len(name) <= MAX_CLASS_NAME or not name.isprintable():
                raise ShapeError(f"architecture: a class needs a printable name of at most {MAX_CLASS_NAME} characters")
        if not 0 <= self.mean <= 1 or not 1e-3 <= self.deviation <= 1:
            raise ShapeError("architecture: mean must be from 0 to 1, and deviation from 0.001 to 1")

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> PictureArchitecture:
        """Build from a manifest's JSON object. Raises ShapeError, KeyError or TypeError."""
        return PictureArchitecture(**{**record, "classes": tuple(record["classes"])})

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
