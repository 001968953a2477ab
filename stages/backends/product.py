"""Products with large matrices, which an AR step reads from memory once for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.rows import Rows
from stages.pages import give_back, is_owned
from stages.tied_head import TiedHead

_ONEDNN: Any = torch.ops.mkldnn
FEWEST_ROWS = 4
"""oneDNN has a kernel of its own for one row, which adds in another order; from here on a row's result is the same in
any company, and this many rows take no longer than one: what is waited for is the matrix."""
USUAL_ROWS = 16
"""What the layout is chosen for."""
BLOCK_BYTES = 32 << 20
"""A larger matrix is laid out in blocks of rows, each of which is given back then: a head of 50,000 tokens may be most
of its stage, and would be there twice for a moment. What comes out is the same, to the last bit."""


class Product:
    """x @ weight.T + bias, with the weight in oneDNN's blocked layout: read in order, it is there in fewer accesses.

    Takes the linear layer's weight over, which is empty afterwards; that of a tied head stays, for the embedding reads
    it. The operators are those that torch's compiler uses, and have no public name: the exact version of torch that
    this package asks for has them.
    """

    is_packed = torch.backends.mkldnn.is_available()

    def __init__(self, linear: nn.Linear | TiedHead) -> None:
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        if isinstance(linear, nn.Linear):
            linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        count = max(1, BLOCK_BYTES // (4 * weight.shape[1])) if self.is_packed else len(weight)
        starts = range(0, len(weight), count)
        self.biases = [None if bias is None else bias[start : start + count] for start in starts]
        owned = is_owned(weight)
        self.blocks = list[Tensor]()
        for start in starts:
            block = weight[start : start + count]
            self.blocks.append(_ONEDNN._reorder_linear_weight(block, USUAL_ROWS) if self.is_packed else block)
            if owned and len(starts) > 1:
                give_back(block)

    @staticmethod
    def rows(counts: Sequence[int], hidden: int) -> Rows:
        """Rows such that the result of each depends on no other. hidden: numbers in a row of the widest layer."""
        return Rows.of(counts, hidden, FEWEST_ROWS if Product.is_packed else 0)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in) -> (rows, out)."""
        results = [self._product(x, *each) for each in zip(self.blocks, self.biases, strict=True)]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_packed:
            result: Tensor = _ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
            return result
        return F.linear(x, weight, bias)
