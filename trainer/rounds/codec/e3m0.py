"""A sign and three bits of exponent, one float32 scale for 128 numbers: 4 bits a number.

The format of Streaming DiLoCo's outer gradients (arXiv 2501.18512), whose paper does not say how numbers are scaled:
here the largest of a group is 1, and the values are 0 and plus or minus 1, 1/2, ... 1/64 of it, each number going to
the nearest. A tensor is the scales of its groups, then two numbers a byte, the first in the lower half.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.rounds.codec.layout import Raw, TensorCodec, count, float_bytes, floats

GROUP = 128
VALUES = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))])
BOUNDARIES = (VALUES[1:] + VALUES[:-1]) / 2
SIGN = 8


class E3M0(TensorCodec):
    name, bits = "e3m0", 4

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return 4 * _groups(shape) + -(-count(shape) // 2)

    def write(self, values: Tensor) -> bytes:
        flat = values.reshape(-1)
        groups = F.pad(flat, (0, -len(flat) % GROUP)).reshape(-1, GROUP)
        scales = groups.abs().amax(dim=1) if len(groups) else groups.new_zeros(0)
        relative = groups / torch.where(scales > 0, scales, 1.0)[:, None]
        exponents = torch.bucketize(relative.abs(), BOUNDARIES)
        codes = (exponents + SIGN * ((relative < 0) & (exponents > 0))).reshape(-1)[: len(flat)]
        pairs = F.pad(codes, (0, len(flat) % 2)).reshape(-1, 2)
        return float_bytes(scales) + (pairs[:, 0] + 16 * pairs[:, 1]).to(torch.uint8).numpy().tobytes()

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        split, total = 4 * _groups(shape), count(shape)
        pairs = torch.from_numpy(raw[split:].astype(np.int64))
        codes = torch.stack([pairs % 16, pairs // 16], dim=1).reshape(-1)[:total]
        values = torch.cat([VALUES, -VALUES])[codes]
        return (values * floats(raw[:split]).repeat_interleave(GROUP)[:total]).reshape(shape)


def _groups(shape: tuple[int, ...]) -> int:
    return -(-count(shape) // GROUP)
