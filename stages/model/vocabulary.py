"""Symbols that a model reads and writes, and their encoding on the wire.

A byte model's symbols are bytes, and their encoding is the text itself; a token model's are the numbers of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.errors import CodecError

_TYPES = {1: "u1", 2: "<u2", 4: "<u4"}


# Positions, limits, journals and drafts count symbols, so there is no second path for tokens. Text stands at the edges
# only: the router knows the tokenizer, whose digest is in the checkpoint's, and hosts know none.
@dataclass(frozen=True)
class Alphabet:
    """Symbols 0 to `size` - 1, each in as few of 1, 2 or 4 bytes as have room for all, unsigned, little-endian."""

    size: int

    @cached_property
    def symbol_bytes(self) -> int:
        return 1 if self.size <= 1 << 8 else 2 if self.size <= 1 << 16 else 4

    def encode(self, symbols: Sequence[int] | NDArray[np.int64]) -> bytes:
        """Symbols as they travel. They must be below `size`."""
        return np.fromiter(symbols, _TYPES[self.symbol_bytes], len(symbols)).tobytes()

    def split(self, data: bytes) -> list[bytes]:
        """The encoding of each of the symbols of `data`."""
        width = self.symbol_bytes
        return [data[at : at + width] for at in range(0, len(data), width)]

    def decode(self, data: bytes) -> Tensor:
        """Inverse of `encode`: (symbols,) int64. Raises CodecError for bytes that it cannot have made."""
        if len(data) % self.symbol_bytes:
            raise CodecError(f"{len(data)} bytes are not whole symbols of {self.symbol_bytes} bytes")
        symbols = np.frombuffer(data, _TYPES[self.symbol_bytes]).astype(np.int64)
        # every number of one byte is a byte's: the check would cost an AR step as much as the decoding
        if symbols.size and self.size != 1 << 8 and (largest := int(symbols.max())) >= self.size:
            raise CodecError(f"symbol {largest} does not exist: the model has {self.size}")
        return torch.from_numpy(symbols)

    def symbols(self, data: bytes) -> list[int]:
        """`decode` as a list. Raises CodecError."""
        found: list[int] = self.decode(data).tolist()
        return found

    def count(self, data: bytes) -> int:
        """Symbols in `data`; one that is cut short does not count."""
        return len(data) // self.symbol_bytes

    def cut(self, data: bytes, start: int, end: int | None = None) -> bytes:
        """Symbols `start` to `end` of `data`, as a slice of their encoding. Both must be 0 or more."""
        width = self.symbol_bytes
        return data[start * width : None if end is None else end * width]


BYTES = Alphabet(256)
