"""Guesses: what a lookup finds, how many bytes pay, and a small model that goes back on what it wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serving.drafting import (
    MAX_DRAFT,
    MAX_MATCH,
    MAX_TOKENS,
    MIN_MATCH,
    SURE_MATCH,
    BothDrafter,
    Drafter,
    DraftLength,
    LookupDrafter,
    ModelDrafter,
)
from serving.local import LocalModel, LocalSequence
from stages.alphabet import Alphabet

texts = st.text("ab", min_size=1, max_size=60).map(str.encode)
rounds = st.lists(
    st.tuples(st.integers(0, MAX_DRAFT), st.integers(0, MAX_DRAFT), st.floats(0, 50), st.floats(0.1, 500)), max_size=30
)


def draft(drafter: Drafter, text: bytes, count: int) -> bytes:
    return asyncio.run(drafter.draft(text, count))[0]


def brute_force(text: bytes, count: int, least: int) -> bytes:
    """What followed the latest of the longest earlier occurrences of the text's end."""
    for length in range(min(MAX_MATCH, len(text) - 1), least - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends:
            return text[ends[-1] : ends[-1] + count]
    return b""


@given(texts, st.integers(0, 40), st.sampled_from([1, MIN_MATCH, SURE_MATCH]))
@example(b"a" * 60, 32, MIN_MATCH)
@example(b"a", 4, 1)
@example(b"abcabcabc", 0, 1)
def test_a_lookup_finds_what_followed_the_longest_match(text: bytes, count: int, least: int) -> None:
    guesses = draft(LookupDrafter(min_match=least), text, count)
    assert guesses == brute_force(text, count, least)
    assert len(guesses) <= count


TOKENS = Alphabet(300)


@given(st.lists(st.sampled_from([0, 1, 256, 257]), max_size=40), st.integers(0, 8), st.integers(1, 3))
@example([0, 256, 1, 0, 1, 0], 4, 1)
def test_a_lookup_of_tokens_is_never_a_match_of_halves(text: list[int], count: int, least: int) -> None:
    """Encoded, 256 is 0 and 1, and 1 is 1 and 0: bytes match where no tokens do."""
    expected = next(
        (
            text[at + length : at + length + count]
            for length in range(min(MAX_TOKENS, len(text) - 1), least - 1, -1)
            for at in reversed(range(len(text) - length))
            if text[at : at + length] == text[-length:]
        ),
        [],
    )
    assert TOKENS.symbols(draft(LookupDrafter(TOKENS, least), TOKENS.encode(text), count)) == expected


def test_a_short_match_is_none() -> None:
    assert draft(LookupDrafter(), b"the sea, the ", 4) == b"sea,"
    assert draft(LookupDrafter(), b"the sea, he ", 4) == b""


def test_the_latest_of_equal_matches_counts() -> None:
    assert draft(LookupDrafter(), b"long ago. long day. long ", 3) == b"day"


# How many


@given(rounds)
def test_the_best_length_is_the_one_with_the_most_bytes_for_its_time(
    booked: list[tuple[int, int, float, float]],
) -> None:
    length = DraftLength()
    for drafted, accepted, draft_ms, trip_ms in booked:
        length.learn(drafted, min(accepted, drafted), draft_ms, trip_ms)
    assert 0 <= length.acceptance <= 1
    a = min(length.acceptance, 0.99)

    def bytes_per_ms(count: int) -> float:
        return sum(a**i for i in range(count + 1)) / (length._trip_ms + count * length._guess_ms)

    best = length.best()
    assert 1 <= best <= MAX_DRAFT
    assert bytes_per_ms(best) == pytest.approx(max(map(bytes_per_ms, range(1, MAX_DRAFT + 1))))


def test_more_is_guessed_where_guesses_are_right_and_trips_long() -> None:
    def after(accepted: int, draft_ms: float, trip_ms: float) -> int:
        length = DraftLength()
        for _ in range(300):
            length.learn(8, accepted, draft_ms, trip_ms)
        return length.best()

    assert after(8, 1.0, 200.0) == MAX_DRAFT
    assert after(0, 8.0, 10.0) == 1
    assert after(4, 8.0, 10.0) < after(4, 8.0, 200.0) < after(7, 8.0, 200.0)


def test_only_places_that_were_reached_count() -> None:
    """Behind the first wrong guess nothing is known."""
    length = DraftLength()
    for _ in range(1000):
        length.learn(10, 3, 1.0, 10.0)
    assert length.acceptance == pytest.approx(3 / 4)
    for _ in range(1000):
        length.learn(3, 3, 1.0, 10.0)
    assert length.acceptance == pytest.approx(1.0)
    before = length.acceptance
    length.learn(0, 0, 0.0, 10.0)
    assert length.acceptance == before


# The small model


@pytest.fixture(scope="module")
def local(bundles: Path) -> LocalModel:
    return LocalModel(bundles / "own" / "local")


edits = st.lists(
    st.tuples(st.integers(0, 60), st.binary(max_size=20), st.integers(0, 12)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.binary(min_size=1, max_size=160), changes=edits, temperature=st.sampled_from([0.0, 0.8]))
def test_a_sequence_that_goes_back_writes_what_a_new_one_does(
    local: LocalModel, start: bytes, changes: list[tuple[int, bytes, int]], temperature: float
) -> None:
    """Of a text that is cut anywhere and goes on otherwise, again and again, as when guesses are wrong."""
    sequence, text = LocalSequence(local, 400, temperature, seed=7), start
    for back, new, count in changes:
        text = text[: max(len(text) - back, 1)] + new
        written, _ = sequence._write(text, count)
        assert len(written) == count
        assert written == LocalSequence(local, 400, temperature, seed=7)._write(text, count)[0]
        text += written


def test_a_model_guesses_what_it_would_write(local: LocalModel) -> None:
    async def text() -> bytes:
        return b"".join([piece async for piece, _ in local.generate(b"The sea ", 40, 0.8, 3, 1 << 60)])

    written = asyncio.run(text())
    drafter = ModelDrafter(LocalSequence(local, 60, 0.8, 3))
    for start, count in ((0, 5), (3, 8), (20, 20), (1, 1)):
        assert draft(drafter, b"The sea " + written[:start], count) == written[start : start + count]
    assert draft(drafter, b"The sea ", 0) == b""


def test_both_trust_a_long_match_and_else_the_model(local: LocalModel) -> None:
    model = ModelDrafter(LocalSequence(local, 80, 0.0, 0))
    both, again = BothDrafter(model), b"it was a dark night; it was a dar"
    assert draft(both, again, 4) == b"k ni"
    for text in (b"night; nig", b"x"):
        assert draft(both, text, 4) == draft(model, text, 4) != b""
