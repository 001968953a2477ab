"""Prompts of our own."""

import pytest

from loadtest.workload.prompts import BUILT_IN, COPYING, NOVEL


def test_ours_are_enough_different_and_end_where_a_word_does() -> None:
    assert len(NOVEL.texts) >= 20
    for prompts in BUILT_IN.values():
        assert len(set(prompts.texts)) == len(prompts.texts)
        assert all(text.isascii() and text == text.rstrip(" ") for text in prompts.texts)
    assert NOVEL.text(len(NOVEL.texts) + 1) == NOVEL.texts[1]


@pytest.mark.parametrize("text", COPYING.texts)
def test_what_is_to_be_copied_stands_in_the_prompt(text: str) -> None:
    assert text[-6:] in text[:-6], "a lookup would find nothing"
