"""Symbols come back from their encoding as they were, and nothing else does."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import CodecError
from stages.model.vocabulary import BYTES, Alphabet

sizes = st.sampled_from([1, 2, 255, 256, 257, 49_152, 1 << 16, (1 << 16) + 1, 128_256])


@st.composite
def texts(draw: st.DrawFn) -> tuple[Alphabet, list[int]]:
    alphabet = Alphabet(draw(sizes))
    return alphabet, draw(st.lists(st.integers(0, alphabet.size - 1), max_size=30))


@given(texts())
def test_symbols_come_back(text: tuple[Alphabet, list[int]]) -> None:
    alphabet, symbols = text
    data = alphabet.encode(symbols)
    assert alphabet.symbols(data) == symbols
    assert alphabet.decode(data).dtype == torch.int64
    assert (alphabet.count(data), len(data)) == (len(symbols), len(symbols) * alphabet.symbol_bytes)


@given(texts(), st.integers(0, 40), st.none() | st.integers(0, 40))
def test_a_cut_is_a_slice(text: tuple[Alphabet, list[int]], start: int, end: int | None) -> None:
    alphabet, symbols = text
    assert alphabet.symbols(alphabet.cut(alphabet.encode(symbols), start, end)) == symbols[start:end]


@given(sizes, st.binary(max_size=41))
def test_whatever_arrives_is_symbols_or_refused(size: int, data: bytes) -> None:
    alphabet = Alphabet(size)
    try:
        symbols = alphabet.symbols(data)
    except CodecError:
        return
    assert all(0 <= symbol < size for symbol in symbols)
    assert alphabet.encode(symbols) == data


@given(st.binary(max_size=50))
def test_bytes_are_their_own_encoding(text: bytes) -> None:
    assert BYTES.encode(text) == text
    assert bytes(BYTES.symbols(text)) == text
