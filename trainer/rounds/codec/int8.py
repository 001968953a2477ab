"""Whole numbers from -127 to 127 times one float32 scale a row: 8 bits a number.

A tensor is its scales, then its numbers. The scale of a row is its largest number by size over 127.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.rounds.codec.layout import Raw, TensorCodec, count, float_bytes, floats, rows_of

LEVELS = 127


class Int8(TensorCodec):
    name, bits = "int8", 8

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return 4 * rows_of(shape) + count(shape)

    def write(self, values: Tensor) -> bytes:
        if not values.numel():
            return float_bytes(torch.zeros(rows_of(tuple(values.shape))))
        rows = values.reshape(rows_of(tuple(values.shape)), -1)
        scales = rows.abs().amax(dim=1) / LEVELS
        steps = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().clamp(-LEVELS, LEVELS)
        return float_bytes(scales) + steps.to(torch.int8).numpy().tobytes()

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        split = 4 * rows_of(shape)
        steps = torch.from_numpy(raw[split:].view(np.int8).astype(np.float32))
        if not steps.numel():
            return steps.reshape(shape)
        return (steps.reshape(rows_of(shape), -1) * floats(raw[:split])[:, None]).reshape(shape)
