"""Weights in fewer bits: in bfloat16, or of 4 bits, with a scale and an offset for each group of 32 in a row."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUP = 32
LARGEST = 15
LEAST_SCALE = 2.0**-24  # of float16
BYTES_EACH = 0.5 + 2 * 2 / GROUP  # of a weight, with its share of the scale and the offset
# Rows come in pieces: a whole matrix in float32 takes 6.4 times the memory of what it is made of. Their number is a
# multiple of the blocks of rows that kernels have.
PIECE_NUMBERS = 1 << 21
PIECE_ROWS = 64


class Bfloat16Linear(nn.Linear):
    """A linear map whose matrix has numbers of bfloat16. Its bias, its arithmetic and its results are of float32."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.weight = nn.Parameter(self.weight.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        return F.linear(x, self.weight.float(), self.bias)


class QuantLinear(nn.Linear):
    """A linear map of weights scale * code + offset. It has no `weight`: in float32 there are never more than a few
    rows of it.

    codes: (out, in / 2) uint8. As in GGUF, number i of a group's 16 bytes has weight i of the group in its lower half
    and weight i + 16 in its upper; scales, offsets: (out, in / 32) float16, which is what GGUF's Q4_0 and Q4_1 have.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("codes", torch.zeros(out_features, in_features // 2, dtype=torch.uint8))
        for name in ("scales", "offsets"):
            self.register_buffer(name, torch.zeros(out_features, in_features // GROUP, dtype=torch.float16))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    def pieces(self) -> Iterator[slice]:
        """All rows, some at a time."""
        count = max(1, PIECE_NUMBERS // (self.in_features * PIECE_ROWS)) * PIECE_ROWS
        return (slice(begin, begin + count) for begin in range(0, self.out_features, count))

    def integers(self, rows: slice) -> Tensor:
        """Codes of some rows, each in a byte of its own: (rows, in) uint8."""
        both = self.codes[rows].unflatten(1, (-1, GROUP // 2))
        return torch.cat([both & LARGEST, both >> 4], dim=2).flatten(1)

    def dense(self, rows: slice) -> Tensor:
        """Some rows in float32: (rows, in)."""
        groups = self.integers(rows).unflatten(1, (-1, GROUP)).float()
        scales, offsets = (each[rows].float().unsqueeze(2) for each in (self.scales, self.offsets))
        return groups.mul_(scales).add_(offsets).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        product = torch.cat([F.linear(x, self.dense(rows)) for rows in self.pieces()], dim=-1)
        return product if self.bias is None else product + self.bias


def quantised(weight: Tensor) -> dict[str, Tensor]:
    """A matrix (out, in) float32, rounded to nearest: `QuantLinear`'s codes, scales and offsets.

    Codes 0 and 15 of a group are its smallest and its largest weight. A scale or an offset that float16 does not hold
    is infinite.
    """
    # Fitted by least squares, some layers of SmolLM2 had 7 % less error and more loss (docs/research/pretrained.md).
    groups = weight.unflatten(1, (-1, GROUP))
    offsets = groups.amin(2).half()
    scales = ((groups.amax(2) - offsets.float()) / LARGEST).half()
    divisor = scales.float().clamp(min=LEAST_SCALE).unsqueeze(2)
    codes = (groups - offsets.float().unsqueeze(2)).div_(divisor).round_().clamp_(0, LARGEST).to(torch.uint8)
    lower, upper = codes.chunk(2, dim=2)
    return {"codes": (lower | upper << 4).flatten(1), "scales": scales, "offsets": offsets}
