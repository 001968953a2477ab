"""Matrices in fewer bits: linear maps that hold them, and how numbers are rounded to them."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.model.architecture import GROUP

# Weights in bfloat16, of 8 bits with a scale for each GROUP in a row, or of 4 with a scale and an offset for each.
LARGEST = 15
LARGEST_INT8 = 127
LARGEST_HALF = 65504.0  # of float16, in which weights of bfloat16 are multiplied
BYTES_EACH, INT8_BYTES_EACH = 0.5 + 2 * 2 / GROUP, 1 + 2 / GROUP  # of a weight, with its share of scale and offset
# Rows come in pieces: a whole matrix in float32 takes 6.4 times the memory of what it is made of, and a piece of two
# megabytes stays in the processor's cache, which halves the time. Their number is a multiple of the blocks of rows that
# kernels have.
PIECE_NUMBERS = 1 << 19
PIECE_ROWS = 16
# Of a group's range, what 15 steps may span; and numbers that are fitted at once, which stay in the cache, too.
FITTED_SHARES = (1.07, 1.035, 1.0, 0.965, 0.93, 0.895)
FITTED_NUMBERS = 1 << 18


class Bfloat16Linear(nn.Linear):
    """A linear map whose matrix has numbers of bfloat16. Its bias, its arithmetic and its results are of float32."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.weight = nn.Parameter(self.weight.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        return F.linear(x, self.weight.float(), self.bias)


class GroupedLinear(nn.Linear):
    """A linear map of weights of a few bits, of which GROUP neighbours of a row share a scale. It has no `weight`: in
    float32 there are never more than a few rows of it.

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
        """Codes of the right shape."""

    @abstractmethod
    def dense(self, rows: slice | Tensor) -> Tensor:
        """Some rows in float32: (rows, in)."""

    def pieces(self) -> Iterator[slice]:
        """All rows, some at a time."""
        count = max(1, PIECE_NUMBERS // (self.in_features * PIECE_ROWS)) * PIECE_ROWS
        return (slice(begin, begin + count) for begin in range(0, self.out_features, count))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        product = torch.cat([F.linear(x, self.dense(rows)) for rows in self.pieces()], dim=-1)
        return product if self.bias is None else product + self.bias


class Int8Linear(GroupedLinear):
    """Weights scale * code, which is what GGUF's Q8_0 has. codes: (out, in) int8."""

    bits = 8

    def zeros(self) -> Tensor:
        return torch.zeros(self.out_features, self.in_features, dtype=torch.int8)

    def dense(self, rows: slice | Tensor) -> Tensor:
        groups = self.codes[rows].float().unflatten(1, (-1, GROUP))
        return groups.mul_(self.scales[rows].float().unsqueeze(2)).flatten(1)


def rounded(weight: Tensor, kind: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """A matrix (out, in) float32, rounded to nearest: `Int8Linear`'s codes, and scales of a kind. One that was rounded
    so before has the same codes again."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / LARGEST_INT8).to(kind)
    codes = (groups / scales.float().masked_fill(scales == 0, 1).unsqueeze(2)).round_()
    return {"codes": codes.clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8).flatten(1), "scales": scales}


class Int8Embedding(Int8Linear):
    """A row of such weights for each token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens (...,) int64 -> (..., width)."""
        return self.dense(x.flatten()).unflatten(0, x.shape)


class QuantLinear(GroupedLinear):
    """Weights scale * code + offset, which is what GGUF's Q4_0 and Q4_1 have.

    codes: (out, in / 2) uint8. As in GGUF, number i of a group's 16 bytes has weight i of the group in its lower half
    and weight i + 16 in its upper; offsets: (out, in / 32) float16.
    """

    bits = 4
    offsets: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        # not `zeros_like`, which without memory imports a package of 25 MB
        self.register_buffer("offsets", torch.zeros(self.scales.shape, dtype=torch.float16))

    def zeros(self) -> Tensor:
        return torch.zeros(self.out_features, self.in_features // 2, dtype=torch.uint8)

    def neighbours(self, rows: slice, found: Tensor) -> None:
        """Write codes of some rows, of which weights 2 i and 2 i + 1 of a group are in byte i, into `found`, (rows,
        in / GROUP, GROUP / 2) uint8."""
        two = self.codes[rows].numpy().view("<u2").reshape(*found.shape[:2], -1)  # bytes 2 i and 2 i + 1
        to = found.numpy()  # which takes half of torch's time
        to[..., : GROUP // 4] = two & LARGEST | two >> 4 & LARGEST << 4
        to[..., GROUP // 4 :] = two >> 4 & LARGEST | two >> 8 & LARGEST << 4

    def dense(self, rows: slice | Tensor) -> Tensor:
        both = self.codes[rows].unflatten(1, (-1, GROUP // 2))
        # of signed bytes, which torch turns into floats in half the time
        groups = torch.cat([both & LARGEST, both >> 4], dim=2).view(torch.int8).float()
        scales, offsets = (each[rows].float().unsqueeze(2) for each in (self.scales, self.offsets))
        return groups.mul_(scales).add_(offsets).flatten(1)


def quantised(weight: Tensor) -> dict[str, Tensor]:
    """A matrix (out, in) float32 as `QuantLinear`'s codes, scales and offsets, of the least squared error that is
    found: some more or less than each group's range, from its smallest weight on, is cut into 15 steps, and scale and
    offset are fitted to the codes, as in llama.cpp's `make_qkx2_quants`.

    A scale or an offset that float16 does not hold is infinite.
    """
    found = [_quantised(rows) for rows in weight.split(max(1, FITTED_NUMBERS // weight.shape[1]))]
    return {part: torch.cat([each[part] for each in found]) for part in found[0]}


def _quantised(weight: Tensor) -> dict[str, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP)).permute(2, 0, 1).contiguous()  # a group's numbers in front
    smallest, largest = groups.aminmax(dim=0)
    above = groups - smallest  # small where weights are near each other, so that sums are exact enough
    total, squares = _sums(above), _sums(above.square())
    scales = step = (largest - smallest) / LARGEST
    offsets, least = torch.zeros_like(step), torch.full_like(step, torch.inf)
    for share in FITTED_SHARES:
        codes = _codes(above, share * step)
        of_codes, of_both = _sums(codes), _sums(above * codes)
        spread = GROUP * _sums(codes.square()) - of_codes.square()  # 0 where all codes are one
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
    """Sums of groups, added in one order: torch's own depends on the processor, and every machine that rounds a model
    is to get the same codes."""
    while len(groups) > 1:
        groups = torch.add(*groups.chunk(2))
    return groups[0]


def _codes(above: Tensor, scales: Tensor) -> Tensor:
    """The nearest to weights above their group's offset, as floats; 0 where the scale is."""
    return (above / scales.masked_fill(scales == 0, 1)).round_().clamp_(0, LARGEST)
