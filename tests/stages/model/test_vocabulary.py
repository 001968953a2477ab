"""Tokens come back from their encoding as they were, and nothing else does."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import CodecError
from stages.model.vocabulary import BYTES, Vocabulary

sizes = st.sampled_from([1, 2, 255, 256, 257, 49_152, 1 << 16, (1 << 16) + 1, 128_256])


@st.composite
def texts(draw: st.DrawFn) -> tuple[Vocabulary, list[int]]:
    vocabulary = Vocabulary(draw(sizes))
    return vocabulary, draw(st.lists(st.integers(0, vocabulary.size - 1), max_size=30))


@given(texts())
def test_encoded_tokens_are_decoded_unchanged(text: tuple[Vocabulary, list[int]]) -> None:
    vocabulary, tokens = text
    data = vocabulary.encode(tokens)
    assert vocabulary.tokens(data) == tokens
    assert vocabulary.decode(data).dtype == torch.int64
    assert (vocabulary.count(data), len(data)) == (len(tokens), len(tokens) * vocabulary.token_bytes)


@given(texts(), st.integers(0, 40), st.none() | st.integers(0, 40))
def test_a_cut_is_a_slice(text: tuple[Vocabulary, list[int]], start: int, end: int | None) -> None:
    vocabulary, tokens = text
    assert vocabulary.tokens(vocabulary.cut(vocabulary.encode(tokens), start, end)) == tokens[start:end]


@given(sizes, st.binary(max_size=41))
def test_arbitrary_bytes_are_decoded_or_refused(size: int, data: bytes) -> None:
    vocabulary = Vocabulary(size)
    try:
        tokens = vocabulary.tokens(data)
    except CodecError:
        return
    assert all(0 <= token < size for token in tokens)
    assert vocabulary.encode(tokens) == data


@given(st.binary(max_size=50))
def test_bytes_are_their_own_encoding(text: bytes) -> None:
    assert BYTES.encode(text) == text
    assert bytes(BYTES.tokens(text)) == text
