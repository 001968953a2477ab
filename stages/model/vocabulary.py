"""The tokens of a model, and their encoding on the wire.

A byte model's tokens are bytes, and their encoding is the text itself; a token model's encoding is its token numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stages.device import Tensor, tensor_of
from stages.errors import CodecError

_TYPES = {1: "u1", 2: "<u2", 4: "<u4"}


# Positions, limits, journals and drafts count tokens, so tokens need no second code path. Text appears only at the
# edges: the router knows the tokenizer, whose digest is in the checkpoint's, and hosts know none.
@dataclass(frozen=True)
class Vocabulary:
    """Tokens 0 to `size` - 1, each in the smallest of 1, 2 or 4 bytes that fits all, unsigned, little-endian."""

    size: int

    @cached_property
    def token_bytes(self) -> int:
        return 1 if self.size <= 1 << 8 else 2 if self.size <= 1 << 16 else 4

    def encode(self, tokens: Sequence[int] | NDArray[np.int64]) -> bytes:
        """Encode tokens for the wire. They must be below `size`."""
        return np.fromiter(tokens, _TYPES[self.token_bytes], len(tokens)).tobytes()

    def split(self, data: bytes) -> list[bytes]:
        """The encoding of each token in `data`."""
        width = self.token_bytes
        return [data[at : at + width] for at in range(0, len(data), width)]

    def decode(self, data: bytes) -> Tensor:
        """Inverse of `encode`: (tokens,) int64. Raises CodecError for bytes that `encode` cannot produce."""
        return tensor_of(self._numbers(data))

    def _numbers(self, data: bytes) -> NDArray[np.int64]:
        if len(data) % self.token_bytes:
            raise CodecError(f"{len(data)} bytes are not whole tokens of {self.token_bytes} bytes")
        tokens = np.frombuffer(data, _TYPES[self.token_bytes]).astype(np.int64)
        # every byte is a valid token of a byte model: the check would cost an AR step as much as the decoding
        if tokens.size and self.size != 1 << 8 and (largest := int(tokens.max())) >= self.size:
            raise CodecError(f"token {largest} does not exist: the model has {self.size}")
        return tokens

    def tokens(self, data: bytes) -> list[int]:
        """`decode` as a list. Raises CodecError."""
        return self._numbers(data).tolist()

    def count(self, data: bytes) -> int:
        """Tokens in `data`; a truncated one does not count."""
        return len(data) // self.token_bytes

    def cut(self, data: bytes, start: int, end: int | None = None) -> bytes:
        """Tokens `start` to `end` of `data`, as a slice of their encoding. Both must be 0 or more."""
        width = self.token_bytes
        return data[start * width : None if end is None else end * width]


BYTES = Vocabulary(256)
