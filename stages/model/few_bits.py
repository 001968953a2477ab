"""Matrices in fewer bits: linear maps that hold them, and rounding to them."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.architecture import GROUP

# Weights are bfloat16, 8 bits with a scale for each GROUP of a row, or 4 bits with a scale and an offset for each.
LARGEST = 15
LARGEST_INT8 = 127
MAX_HALF = 65504.0  # of float16, as which bfloat16 weights are multiplied
BYTES_EACH, INT8_BYTES_EACH = 0.5 + 2 * 2 / GROUP, 1 + 2 / GROUP  # of a weight, with its share of scale and offset
# Rows are computed in pieces: a whole matrix in float32 takes 6.4 times the memory of its source, and a piece of two
# megabytes stays in the processor's cache, which halves the time. It has a multiple of PIECE_ROWS, the kernels' blocks.
PIECE_NUMBERS = 1 << 19
PIECE_ROWS = 16
# Shares of a group's range that 15 steps may span; and numbers fitted at once, which also stay in the cache.
FITTED_SHARES = (1.07, 1.035, 1.0, 0.965, 0.93, 0.895)
FITTED_NUMBERS = 1 << 18


class Bfloat16Linear(nn.Linear):
    """A linear map with a bfloat16 matrix. Its bias, its arithmetic and its results are float32."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.weight = nn.Parameter(self.weight.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        return F.linear(x, self.weight.float(), self.bias)


class GroupedLinear(nn.Linear):
    """A linear map with weights of few bits, of which GROUP neighbours in a row share a scale. It has no `weight`: only
    a few rows at a time ever exist in float32.

    scales: (out, in / GROUP) float16.
    """

    bits: int
    codes: Tensor
    scales: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("codes", self.zeros())
        self.register_buffer("scales", torch.zeros(out_features, in_features // GROUP, dtype=torch.float16))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    @abstractmethod
    def zeros(self) -> Tensor:
        """Codes of the right shape, all zero."""

    @abstractmethod
    def dense(self, rows: slice | Tensor) -> Tensor:
        """Some rows in float32: (rows, in)."""

    def pieces(self) -> Iterator[slice]:
        """Slices that cover all rows, some at a time."""
        count = max(1, PIECE_NUMBERS // (self.in_features * PIECE_ROWS)) * PIECE_ROWS
        return (slice(begin, begin + count) for begin in range(0, self.out_features, count))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        product = torch.cat([F.linear(x, self.dense(rows)) for rows in self.pieces()], dim=-1)
        return product if self.bias is None else product + self.bias


class Int8Linear(GroupedLinear):
    """Weights scale * code, as in GGUF's Q8_0. codes: (out, in) int8."""

    bits = 8

    def zeros(self) -> Tensor:
        return torch.zeros(self.out_features, self.in_features, dtype=torch.int8)

    def dense(self, rows: slice | Tensor) -> Tensor:
        groups = self.codes[rows].float().unflatten(1, (-1, GROUP))
        return groups.mul_(self.scales[rows].float().unsqueeze(2)).flatten(1)


def rounded(weight: Tensor) -> dict[str, Tensor]:
    """A matrix (out, in) float32, rounded to nearest: `Int8Linear`'s codes and scales. A matrix that was rounded so
    before gets the same codes again."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / LARGEST_INT8).half()
    codes = (groups / scales.float().masked_fill(scales == 0, 1).unsqueeze(2)).round_()
    return {"codes": codes.clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8).flatten(1), "scales": scales}


class Int8Embedding(Int8Linear):
    """An embedding with one row of such weights for each token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens (...,) int64 -> (..., width)."""
        return self.dense(x.flatten()).unflatten(0, x.shape)


class QuantLinear(GroupedLinear):
    """Weights scale * code + offset, as in GGUF's Q4_0 and Q4_1.

    codes: (out, in / 2) uint8. As in GGUF, byte i of a group's 16 bytes has weight i of the group in its lower half
    and weight i + 16 in its upper; offsets: (out, in / 32) float16.
    """

    bits = 4
    offsets: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        # not `zeros_like`, which imports a package of 25 MB on the meta device
        self.register_buffer("offsets", torch.zeros(self.scales.shape, dtype=torch.float16))

    def zeros(self) -> Tensor:
        return torch.zeros(self.out_features, self.in_features // 2, dtype=torch.uint8)

    def neighbours(self, rows: slice, found: Tensor) -> None:
        """Write codes of some rows into `found`, (rows, in / GROUP, GROUP / 2) uint8, with weights 2 i and 2 i + 1 of a
        group in byte i."""
        two = self.codes[rows].numpy().view("<u2").reshape(*found.shape[:2], -1)  # bytes 2 i and 2 i + 1
        to = found.numpy()  # takes half of torch's time
        to[..., : GROUP // 4] = two & LARGEST | two >> 4 & LARGEST << 4
        to[..., GROUP // 4 :] = two >> 4 & LARGEST | two >> 8 & LARGEST << 4

    def dense(self, rows: slice | Tensor) -> Tensor:
        both = self.codes[rows].unflatten(1, (-1, GROUP // 2))
        # signed bytes, which torch converts to floats in half the time
        groups = torch.cat([both & LARGEST, both >> 4], dim=2).view(torch.int8).float()
        scales, offsets = (each[rows].float().unsqueeze(2) for each in (self.scales, self.offsets))
        return groups.mul_(scales).add_(offsets).flatten(1)


def quantised(weight: Tensor) -> dict[str, Tensor]:
    """A matrix (out, in) float32 as `QuantLinear`'s codes, scales and offsets, with the least squared error found. A
    range around each group's own, from its smallest weight on, is cut into 15 steps, and scale and offset are fitted to
    the codes, as in llama.cpp's `make_qkx2_quants`.

    A scale or an offset outside float16's range becomes infinite.
    """
    found = [_quantised(rows) for rows in weight.split(max(1, FITTED_NUMBERS // weight.shape[1]))]
    return {part: torch.cat([each[part] for each in found]) for part in found[0]}


def _quantised(weight: Tensor) -> dict[str, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP)).permute(2, 0, 1).contiguous()  # a group's numbers first
    smallest, largest = groups.aminmax(dim=0)
    above = groups - smallest  # small if weights are near each other, so that sums are exact enough
    total, squares = _sums(above), _sums(above.square())
    scales = step = (largest - smallest) / LARGEST
    offsets, least = torch.zeros_like(step), torch.full_like(step, torch.inf)
    for share in FITTED_SHARES:
        codes = _codes(above, share * step)
        of_codes, of_both = _sums(codes), _sums(above * codes)
        spread = GROUP * _sums(codes.square()) - of_codes.square()  # 0 if all codes are equal
        scale = (GROUP * of_both - total * of_codes) / spread.masked_fill(spread == 0, 1)
        offset = (total - scale * of_codes) / GROUP
        error = squares - scale * of_both - offset * total
        is_less = error < least
        least = torch.where(is_less, error, least)
        scales, offsets = torch.where(is_less, scale, scales), torch.where(is_less, offset, offsets)
    scales, offsets = scales.half(), (smallest + offsets).half()
    lower, upper = _codes(groups - offsets.float(), scales.float()).to(torch.uint8).chunk(2)
    return {"codes": (lower | upper << 4).permute(1, 2, 0).flatten(1), "scales": scales, "offsets": offsets}


def _sums(groups: Tensor) -> Tensor:
    """Sums of groups, added in a fixed order: torch's own order depends on the processor, and every machine that rounds
    a model must get the same codes."""
    while len(groups) > 1:
        groups = torch.add(*groups.chunk(2))
    return groups[0]


def _codes(above: Tensor, scales: Tensor) -> Tensor:
    """The codes nearest to weights, given above their group's offset, as floats; 0 where the scale is 0."""
    return (above / scales.masked_fill(scales == 0, 1)).round_().clamp_(0, LARGEST)
