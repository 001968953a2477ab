"""What all codecs share: the order of tensors, and a check of the size before anything is allocated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.errors import CodecError
from trainer.rounds.tensors import Shapes, Tensors

Raw = NDArray[np.uint8]


class TensorCodec(ABC):
    """A codec that writes one tensor after the other; a subclass says how one is written."""

    name: str
    bits: float

    def size(self, like: Shapes) -> int:
        return sum(self.tensor_size(shape) for shape in like.values())

    def encode(self, tensors: Tensors) -> bytes:
        """Raises CodecError for numbers that are not finite."""
        parts = []
        for name in sorted(tensors):
            values = tensors[name].detach().to("cpu", torch.float32).contiguous()
            if not bool(values.isfinite().all()):
                raise CodecError(f"{name} has numbers that are not finite; they do not travel")
            parts.append(self.write(values))
        return b"".join(parts)

    def decode(self, data: bytes | memoryview, like: Shapes) -> Tensors:
        if len(data) != (size := self.size(like)):
            raise CodecError(f"{len(data)} bytes of {self.name}, but these tensors take {size}")
        raw, offset, tensors = np.frombuffer(data, dtype=np.uint8), 0, dict[str, Tensor]()
        for name in sorted(like):
            end = offset + self.tensor_size(like[name])
            tensors[name] = self.read(raw[offset:end], like[name])
            offset = end
        return tensors

    @abstractmethod
    def tensor_size(self, shape: tuple[int, ...]) -> int:
        """Bytes of one tensor."""

    @abstractmethod
    def write(self, values: Tensor) -> bytes: ...

    @abstractmethod
    def read(self, raw: Raw, shape: tuple[int, ...]) -> Tensor: ...


def rows_of(shape: tuple[int, ...]) -> int:
    """Rows that have a scale of their own: those of a matrix, one for anything flatter."""
    return shape[0] if len(shape) > 1 else 1


def floats(raw: Raw) -> Tensor:
    """Little-endian float32 numbers, as a tensor of its own memory."""
    return torch.from_numpy(raw.view("<f4").astype(np.float32))


def float_bytes(values: Tensor) -> bytes:
    return values.reshape(-1).numpy().astype("<f4", copy=False).tobytes()


def count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
