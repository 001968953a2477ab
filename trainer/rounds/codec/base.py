"""The interface of codecs: how the numbers of a part travel."""

from __future__ import annotations

from typing import Protocol

from trainer.rounds.tensors import Shapes, Tensors


class Codec(Protocol):
    """Tensors travel in the order of their sorted names, one after the other, with nothing in between."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> float:
        """Of one number; scales come on top."""
        ...

    def size(self, like: Shapes) -> int:
        """Bytes of tensors of these shapes, exactly."""
        ...

    def encode(self, tensors: Tensors) -> bytes: ...

    def decode(self, data: bytes | memoryview, like: Shapes) -> Tensors:
        """Raises CodecError unless `data` has `size(like)` bytes, before anything is allocated."""
        ...
