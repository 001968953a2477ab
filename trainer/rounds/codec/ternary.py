"""-1, 0 or 1 times one float32 scale for 256 numbers, five to a byte: 1.7 bits a number.

What is 0 and what the scale is are those of ternary weight networks (arXiv 1605.04711): numbers nearer to 0 than 0.7 of
their group's mean size are 0, and the scale is the mean size of the others, which is nearly the least squares of what
can be said so. That is coarse: it needs error feedback (after which, with Muon inside, two bits are said to cost
nothing: arXiv 2505.23725). A tensor is the scales of its groups, then base-3 numbers of five digits, the first digit
the lowest; digit 0 stands for 0, 1 for plus and 2 for minus.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.rounds.codec.layout import Raw, TensorCodec, count, float_bytes, floats

GROUP = 256
DIGITS = 5
ZERO = 0.7
POWERS = 3 ** torch.arange(DIGITS)
SIGNS = torch.tensor([0.0, 1.0, -1.0])


class Ternary(TensorCodec):
    name, bits = "ternary", 8 / DIGITS

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return 4 * -(-count(shape) // GROUP) + -(-count(shape) // DIGITS)

    def write(self, values: Tensor) -> bytes:
        flat = values.reshape(-1)
        groups = F.pad(flat, (0, -len(flat) % GROUP)).reshape(-1, GROUP)
        sizes = groups.abs()
        # the last group is shorter than it was made
        numbers = torch.full((len(groups), 1), GROUP)
        numbers[-1:] -= groups.numel() - len(flat)
        is_large = sizes > ZERO * sizes.sum(dim=1, keepdim=True) / numbers
        scales = (sizes * is_large).sum(dim=1) / is_large.sum(dim=1).clamp(min=1)
        digits = (is_large * torch.where(groups < 0, 2, 1)).reshape(-1)[: len(flat)]
        packed = (F.pad(digits, (0, -len(flat) % DIGITS)).reshape(-1, DIGITS) * POWERS).sum(dim=1)
        return float_bytes(scales) + packed.to(torch.uint8).numpy().tobytes()

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        total = count(shape)
        split = 4 * -(-total // GROUP)
        packed = torch.from_numpy(raw[split:].astype(np.int64))
        digits = (packed[:, None] // POWERS % 3).reshape(-1)[:total]
        return (SIGNS[digits] * floats(raw[:split]).repeat_interleave(GROUP)[:total]).reshape(shape)
