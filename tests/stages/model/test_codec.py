"""State codecs: errors, sizes, and refused payloads."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

from stages.errors import CodecError
from stages.model.codec import CODECS, HiddenInt8, Int4, Int8, StateCodec, codec_named

HIDDEN_INT8 = HiddenInt8()
ALL = pytest.mark.parametrize("codec", [*CODECS.values(), HIDDEN_INT8], ids=lambda codec: type(codec).__name__)
SCALED = pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
LIMIT = 1e6


@st.composite
def matrices(draw: st.DrawFn, largest: float = 1e6) -> Tensor:
    """Rows of very different magnitudes, exact zeros among them; odd widths and no positions at all too."""
    shape = draw(array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9))
    shape = (0, shape[1]) if draw(st.booleans()) and draw(st.booleans()) else shape
    rows = draw(arrays(np.float32, shape, elements=st.floats(-1, 1, width=32, allow_subnormal=False)))
    magnitudes = draw(arrays(np.float32, (shape[0], 1), elements=st.sampled_from([0.0, 1e-6, 0.01, 1.0, largest])))
    return torch.from_numpy(rows * magnitudes)


@ALL
@given(matrices())
def test_the_size_is_known_before_encoding(codec: StateCodec, matrix: Tensor) -> None:
    assert len(codec.encode(matrix)) == codec.size(*matrix.shape)


@given(matrices())
def test_fp32_is_exact(matrix: Tensor) -> None:
    assert torch.equal(codec_named("fp32").round_trip(matrix, LIMIT), matrix)


@SCALED
@given(matrix=matrices())
def test_the_error_is_at_most_half_a_step(codec: Int8 | Int4, matrix: Tensor) -> None:
    largest = matrix.abs().amax(dim=1, keepdim=True).double() if matrix.numel() else matrix.double()
    step = largest / codec.levels
    error = (codec.round_trip(matrix, LIMIT).double() - matrix.double()).abs()
    assert bool((error <= step * 0.5 * (1 + 1e-5) + 1e-37).all())


@given(matrices())
def test_the_largest_values_of_a_hidden_row_are_exact(matrix: Tensor) -> None:
    apart = min(HiddenInt8.APART, matrix.shape[1])
    magnitudes = matrix.abs().double().sort(dim=1, descending=True).values
    error = (HIDDEN_INT8.round_trip(matrix, LIMIT).double() - matrix.double()).abs()
    if matrix.shape[1] == apart:
        assert not error.any()
        return
    step = magnitudes[:, apart : apart + 1] / Int8.levels
    assert bool((error <= step * 0.5 * (1 + 1e-5) + 1e-37).all())
    assert bool(((error > 0).sum(dim=1) <= matrix.shape[1] - apart).all())


@given(matrices(), st.data())
def test_a_hidden_row_is_encoded_independently_of_other_rows(matrix: Tensor, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, max(len(matrix) - 1, 0)))
    alone = HIDDEN_INT8.round_trip(matrix[row : row + 1], LIMIT)
    assert torch.equal(HIDDEN_INT8.round_trip(matrix, LIMIT)[row : row + 1], alone)


@SCALED
@given(matrix=matrices())
def test_a_decoded_matrix_encodes_to_the_same_bytes(codec: Int8 | Int4, matrix: Tensor) -> None:
    payload = codec.encode(torch.where(matrix.abs() < 1e-30, 0.0, matrix))
    assert codec.encode(codec.decode(payload, *matrix.shape, limit=LIMIT)) == payload


def test_int4_packs_the_low_nibble_first() -> None:
    payload = Int4().encode(torch.tensor([[7.0, -7.0, 1.0]]))
    assert payload == struct.pack("<f", 1.0) + bytes([15 | 1 << 4, 9 | 8 << 4])


def test_a_hidden_row_is_encoded_as_largest_values_places_and_rest() -> None:
    payload = HIDDEN_INT8.encode(torch.tensor([[900.0, 127.0, -800.0, 0.0, 700.0, -1.0, -600.0]]))
    values, places = struct.pack("<4f", 900, -800, 700, -600), struct.pack("<4H", 0, 2, 4, 6)
    assert payload == values + places + struct.pack("<f7b", 1.0, 0, 127, 0, 0, 0, -1, 0)
    assert HIDDEN_INT8.size(1, 576) == 576 + 28


# Refusals
@ALL
@given(st.binary(max_size=200), st.integers(0, 6), st.integers(0, 40), st.sampled_from([2.0, 1e6]))
def test_arbitrary_bytes_decode_or_are_refused(
    codec: StateCodec, payload: bytes, positions: int, dim: int, limit: float
) -> None:
    try:
        matrix = codec.decode(payload, positions, dim, limit)
    except CodecError:
        return
    assert matrix.shape == (positions, dim)
    assert matrix.dtype == torch.float32
    assert bool((matrix.abs() <= limit * 1.0002).all())


@ALL
@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"\0", lambda p: b""])
def test_a_wrong_length_is_refused_with_both_lengths(codec: StateCodec, change: object) -> None:
    payload, due = change(codec.encode(torch.ones(3, 5))), codec.size(3, 5)
    with pytest.raises(CodecError, match=f"{codec.name} payload has {len(payload)} bytes; 3 x 5 numbers take {due}"):
        codec.decode(payload, 3, 5, LIMIT)


@SCALED
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1e-3, -float("inf"), 3e38, 2.1])
def test_invalid_scales_are_refused(codec: Int8 | Int4, scale: float) -> None:
    payload = bytearray(codec.encode(torch.ones(3, 5)))
    payload[4:8] = struct.pack("<f", scale)
    with pytest.raises(CodecError, match="scales"):
        codec.decode(bytes(payload), 3, 5, limit=2.0)


@SCALED
def test_integers_beyond_the_levels_are_refused(codec: Int8 | Int4) -> None:
    """Two's complement has one more below zero."""
    payload = codec.encode(torch.ones(1, 2))[:4] + bytes([0x80] * 2 if codec.name == "int8" else [0x00])
    with pytest.raises(CodecError, match=f"integers beyond {codec.levels}"):
        codec.decode(payload, 1, 2, limit=2.0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2.5])
def test_numbers_that_are_not_finite_or_too_large_are_refused(number: float) -> None:
    matrix = torch.zeros(3, 5)
    matrix[1, 2] = number
    codec = codec_named("fp32")
    with pytest.raises(CodecError, match="not finite or beyond 2"):
        codec.decode(codec.encode(matrix), 3, 5, limit=2.0)


@pytest.mark.parametrize("codec", [Int8(), Int4(), HIDDEN_INT8], ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_states_that_are_not_finite_are_refused(codec: StateCodec, number: float) -> None:
    matrix = torch.zeros(2, 4)
    matrix[0, 3] = number
    with pytest.raises(CodecError):
        codec.round_trip(matrix, LIMIT)
