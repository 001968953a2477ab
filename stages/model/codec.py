"""State codecs: encodings of a matrix of numbers (one row for each position) between blocks.

Every codec knows its size before encoding, so a message can be checked before anything is allocated.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from stages.device import Tensor, tensor_of
from stages.errors import CodecError, quoted

ESTIMATE_LIMIT = 2.0  # largest magnitude accepted in an estimate E. A weighted mean of unit-norm codes stays under 1.
FEATURE_LIMIT = 1e6  # largest magnitude accepted in features or hidden states


class StateCodec(ABC):
    """Encodes (positions, dim) float32 matrices."""

    name: str

    @abstractmethod
    def size(self, positions: int, dim: int) -> int:
        """Payload bytes of a (positions, dim) matrix."""

    @abstractmethod
    def encode(self, matrix: Tensor) -> bytes: ...

    @abstractmethod
    def _decode(self, payload: bytes, positions: int, dim: int, limit: float) -> NDArray[np.float32]: ...

    def decode(self, payload: bytes, positions: int, dim: int, limit: float) -> Tensor:
        """The matrix, (positions, dim) float32.

        Raises CodecError for a wrong length, or numbers that are not finite or beyond `limit`.
        """
        expected = self.size(positions, dim)
        if len(payload) != expected:
            raise CodecError(
                f"{self.name} payload has {len(payload)} bytes; {positions} x {dim} numbers take {expected}"
            )
        return tensor_of(self._decode(payload, positions, dim, limit))

    def round_trip(self, matrix: Tensor, limit: float) -> Tensor:
        """The matrix as the next block receives it. matrix: (positions, dim)."""
        positions, dim = matrix.shape
        return self.decode(self.encode(matrix), positions, dim, limit)


class Fp32(StateCodec):
    """Four bytes a number, exact: for debugging and parity tests."""

    name = "fp32"

    def size(self, positions: int, dim: int) -> int:
        return 4 * positions * dim

    def round_trip(self, matrix: Tensor, limit: float) -> Tensor:
        """`matrix` itself: the encoding is lossless."""
        return matrix

    def encode(self, matrix: Tensor) -> bytes:
        return matrix.detach().numpy().astype("<f4").tobytes()

    def _decode(self, payload: bytes, positions: int, dim: int, limit: float) -> NDArray[np.float32]:
        matrix = np.frombuffer(payload, dtype="<f4").astype(np.float32).reshape(positions, dim)
        if not np.all(np.abs(matrix) <= limit):  # false for NaN too
            raise CodecError(f"fp32 payload holds numbers that are not finite or beyond {limit:g}")
        return matrix


class Int8(StateCodec):
    """One byte per number and a float32 scale per position: [scales, little-endian][rows].

    256 positions x 32 numbers take 9 KB, one TCP flight. The numbers of an estimate have similar size, so one scale a
    row serves them.
    A decoded matrix encodes to the same bytes again. For levels of 2^n - 1 the scale survives both roundings,
    (levels * s) / levels = s, because x / levels never falls where it would not (subnormal scales excepted).
    """

    name = "int8"
    levels = 127

    def size(self, positions: int, dim: int) -> int:
        return positions * (4 + self._row_bytes(dim))

    def encode(self, matrix: Tensor) -> bytes:
        rows = matrix.detach().numpy().astype(np.float32)
        scales = (np.abs(rows).max(axis=1, initial=0) / np.float32(self.levels)).astype("<f4")
        divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
        integers = np.clip(np.rint(rows / divisor), -self.levels, self.levels).astype(np.int8)
        return scales.tobytes() + self._pack(integers)

    def _decode(self, payload: bytes, positions: int, dim: int, limit: float) -> NDArray[np.float32]:
        scales = np.frombuffer(payload, dtype="<f4", count=positions).astype(np.float32)
        # levels * scale is the largest magnitude of a row; one rounding step over the limit is still honest
        if not np.all((scales >= 0) & (scales <= limit * 1.0001 / self.levels)):
            raise CodecError(f"{self.name} payload holds scales that are not finite, negative or beyond {limit:g}")
        integers = self._unpack(payload[4 * positions :], positions, dim)
        if np.any(integers < -self.levels):  # two's complement has one more integer below zero
            raise CodecError(f"{self.name} payload holds integers beyond {self.levels}")
        return integers.astype(np.float32) * scales[:, None]

    def _row_bytes(self, dim: int) -> int:
        return dim

    def _pack(self, integers: NDArray[np.int8]) -> bytes:
        return integers.tobytes()

    def _unpack(self, payload: bytes, positions: int, dim: int) -> NDArray[np.int8]:
        return np.frombuffer(payload, dtype=np.int8).reshape(positions, dim)


class Int4(Int8):
    """Two numbers per byte, low nibble first, and a scale per position."""

    name = "int4"
    levels = 7

    def _row_bytes(self, dim: int) -> int:
        return -(-dim // 2)

    def _pack(self, integers: NDArray[np.int8]) -> bytes:
        padded = np.pad(integers, ((0, 0), (0, integers.shape[1] % 2)))
        nibbles = (padded + 8).astype(np.uint8)
        return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).tobytes()

    def _unpack(self, payload: bytes, positions: int, dim: int) -> NDArray[np.int8]:
        row = self._row_bytes(dim)
        packed = np.frombuffer(payload, dtype=np.uint8).reshape(positions, row)
        nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(positions, 2 * row)[:, :dim]
        return nibbles.astype(np.int8) - np.int8(8)


# The largest number of a hidden row is 11 to 18 times its root mean square (SmolLM2-135M, both cuts). It is always in
# the same few channels, so one scale for the row is coarse for all others (docs/research/pretrained.md).
class HiddenInt8(StateCodec):
    """One byte per number and a scale per position, except for the few largest of each row, which are exact.

    A row of a pretrained model has a few numbers far larger than the rest, whose scale would be coarse for the rest.
    [values, little-endian float32][their indices, uint16, ascending in each row][the rest as in `Int8`].
    """

    name = "int8"
    # Float32, not half precision: fp16 ends at 65,504 and a hidden state may exceed it; bf16 would save 8 bytes a row.
    APART = 4  # exact numbers of a row; all, if it has no more
    _rest = Int8()

    def size(self, positions: int, dim: int) -> int:
        return 6 * positions * self._apart(dim) + self._rest.size(positions, dim)

    def encode(self, matrix: Tensor) -> bytes:
        rest = matrix.detach().numpy().astype(np.float32)
        count = self._apart(rest.shape[1])
        places = np.sort(np.argpartition(np.abs(rest), -count, axis=1)[:, -count:], axis=1)
        values = np.take_along_axis(rest, places, axis=1)
        np.put_along_axis(rest, places, 0, axis=1)
        return values.astype("<f4").tobytes() + places.astype("<u2").tobytes() + self._rest.encode(tensor_of(rest))

    def _decode(self, payload: bytes, positions: int, dim: int, limit: float) -> NDArray[np.float32]:
        shape, count = (positions, self._apart(dim)), positions * self._apart(dim)
        values = np.frombuffer(payload, dtype="<f4", count=count).astype(np.float32).reshape(shape)
        places = np.frombuffer(payload, dtype="<u2", count=count, offset=4 * count).astype(np.int64).reshape(shape)
        if not np.all(np.abs(values) <= limit):  # false for NaN too
            raise CodecError(f"int8 payload holds numbers that are not finite or beyond {limit:g}")
        if np.any(places >= dim) or np.any(np.diff(places, axis=1) <= 0):
            raise CodecError(f"int8 payload holds places that do not ascend or lie beyond a row of {dim}")
        matrix = self._rest._decode(payload[6 * count :], positions, dim, limit)
        np.put_along_axis(matrix, places, values, axis=1)
        return matrix

    def _apart(self, dim: int) -> int:
        return min(self.APART, dim)


# Codecs for estimates between blocks.
CODECS: dict[str, StateCodec] = {codec.name: codec for codec in (Fp32(), Int8(), Int4())}
# Codecs for hidden states between AR stages.
HIDDEN: dict[str, StateCodec] = {codec.name: codec for codec in (Fp32(), HiddenInt8())}


def codec_named(name: str, codecs: dict[str, StateCodec] = CODECS, what: str = "state codec") -> StateCodec:
    """The codec called `name`, by default of estimates. Raises CodecError that lists the names."""
    if name not in codecs:
        raise CodecError(f"unknown {what} {quoted(name)}; choose from {', '.join(codecs)}")
    return codecs[name]


def hidden_codec(name: str) -> StateCodec:
    """The codec of hidden states called `name`. Raises CodecError that lists the names."""
    return codec_named(name, HIDDEN, "codec of hidden states")
