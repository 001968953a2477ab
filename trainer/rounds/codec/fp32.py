"""Float32 as it is: 32 bits a number."""

from __future__ import annotations

from torch import Tensor

from trainer.rounds.codec.layout import Raw, TensorCodec, count, float_bytes, floats


class Fp32(TensorCodec):
    name, bits = "fp32", 32

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        return 4 * count(shape)

    def write(self, values: Tensor) -> bytes:
        return float_bytes(values)

    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor:
        return floats(raw).reshape(shape)
