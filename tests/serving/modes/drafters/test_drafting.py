"""Guesses: what a lookup finds, and a small model that goes back on what it wrote."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serving.modes.drafters.local_model import LocalModel, LocalSequence
from serving.modes.speculative import (
    MAX_MATCH,
    MAX_TOKENS,
    MIN_MATCH,
    SURE_MATCH,
    BothDrafter,
    Drafter,
    LookupDrafter,
    ModelDrafter,
)
from stages.model.draft_tree import Draft, DraftLength, DraftPlan, SweepTime
from stages.model.vocabulary import Vocabulary

texts = st.text("ab", min_size=1, max_size=60).map(str.encode)


def worth() -> DraftLength:
    return DraftLength(SweepTime())


def tokens(drafter: Drafter, text: bytes, count: int) -> list[int]:
    return list(asyncio.run(drafter.draft(text, DraftPlan(count, count))).tokens)


def draft(drafter: Drafter, text: bytes, count: int) -> bytes:
    return bytes(tokens(drafter, text, count))


def brute_force(text: bytes, count: int, least: int) -> bytes:
    """What followed the latest of the longest earlier occurrences of the text's end."""
    for length in range(min(MAX_MATCH, len(text) - 1), least - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends:
            return text[ends[-1] : ends[-1] + count]
    return b""


@given(texts, st.integers(1, 40), st.sampled_from([1, MIN_MATCH, SURE_MATCH]))
@example(b"a" * 60, 32, MIN_MATCH)
@example(b"a", 4, 1)
def test_a_lookup_finds_what_followed_the_longest_match(text: bytes, count: int, least: int) -> None:
    guesses = draft(LookupDrafter(worth(), min_match=least), text, count)
    assert guesses == brute_force(text, count, least)
    assert len(guesses) <= count


TOKENS = Vocabulary(300)


@given(st.lists(st.sampled_from([0, 1, 256, 257]), max_size=40), st.integers(1, 8), st.integers(1, 3))
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
    assert tokens(LookupDrafter(worth(), TOKENS, least), TOKENS.encode(text), count) == expected


# What a draft says of itself

TREE = Draft(
    (1, 2, 3, 2, 5, 4, 4), (0, 1, 2, 1, 2, 0, 1), (0.5, 0.5, 0.2, 0.1, 0.9, 0.3, 0.3), levels=3, compute_ms=7.0
)


def test_a_draft_knows_what_stands() -> None:
    assert (TREE.first, TREE.chance) == (3, pytest.approx(0.05))
    assert [TREE.kept(written) for written in ([], [1], [1, 2, 3, 9], [1, 3], [4, 4])] == [0, 1, 3, 1, 0]
    assert (Draft().first, Draft().chance, Draft().kept([1])) == (0, 1.0, 0)


# The small model


@pytest.fixture(scope="module")
def local(bundles: Path) -> LocalModel:
    return LocalModel(bundles / "own" / "local")


edits = st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=20), st.integers(0, 12)), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.binary(min_size=1, max_size=160), changes=edits, temperature=st.sampled_from([0.0, 0.8]))
def test_a_sequence_that_goes_back_writes_what_a_new_one_does(
    local: LocalModel, start: bytes, changes: list[tuple[int, bytes, int]], temperature: float
) -> None:
    """Of a text that is cut anywhere and continues otherwise, again and again, as when guesses are wrong."""
    sequence, text = LocalSequence(local, 400, temperature, seed=7), start
    for back, new, count in changes:
        text = text[: max(len(text) - back, 1)] + new
        written, _ = sequence._write(text, count)
        assert len(written) == count
        assert written == LocalSequence(local, 400, temperature, seed=7)._write(text, count)[0]
        text += written


def test_both_trust_a_long_match_and_else_the_model(local: LocalModel) -> None:
    model = ModelDrafter(LocalSequence(local, 80, 0.0, 0), worth())
    both, again = BothDrafter(model), b"it was a dark night; it was a dar"
    assert draft(both, again, 4) == b"k ni"
    for text in (b"night; nig", b"x"):
        assert draft(both, text, 4) == draft(model, text, 4) != b""
