"""Products with large matrices, which an AR step reads from memory once for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.rows import ROWS_PER_THREAD, Rows

_ONEDNN: Any = torch.ops.mkldnn
FEWEST_ROWS = 4
"""oneDNN has a kernel of its own for one row, which adds in another order; from here on a row's result is the same in
any company, and this many rows take no longer than one: what is waited for is the matrix."""
USUAL_ROWS = 16
"""What the layout is chosen for."""


class Product:
    """x @ weight.T + bias, with the weight in oneDNN's blocked layout: read in order, it is there in fewer accesses.

    Takes the linear layer's weight over, which is empty afterwards. The operators are those that torch's compiler
    uses, and have no public name: the exact version of torch that this package asks for has them.
    """

    is_packed = torch.backends.mkldnn.is_available()

    def __init__(self, linear: nn.Linear) -> None:
        weight = linear.weight.detach()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.weight = _ONEDNN._reorder_linear_weight(weight, USUAL_ROWS) if self.is_packed else weight
        linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    @staticmethod
    def rows(counts: Sequence[int], hidden: int) -> Rows:
        """Rows such that the result of each depends on no other. hidden: numbers in a row of the widest layer."""
        return Rows.of(counts, hidden, FEWEST_ROWS if Product.is_packed else ROWS_PER_THREAD * torch.get_num_threads())

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in) -> (rows, out)."""
        if self.is_packed:
            return _ONEDNN._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
