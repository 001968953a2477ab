"""The upper half of float32, rounded to nearest even: 16 bits a number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.rounds.codec.layout import Raw, TensorCodec, count


class Bf16(TensorCodec):
    name, bits = "bf16", 16

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return 2 * count(shape)

    def write(self, values: Tensor) -> bytes:
        return values.reshape(-1).bfloat16().view(torch.int16).numpy().astype("<i2", copy=False).tobytes()

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        halves = torch.from_numpy(raw.view("<i2").astype(np.int16))
        return halves.view(torch.bfloat16).float().reshape(shape)
