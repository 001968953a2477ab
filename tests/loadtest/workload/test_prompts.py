"""Prompts of our own."""

from loadtest.workload.prompts import BUILT_IN, COPYING, NOVEL


def test_built_in_prompts_differ_and_end_at_a_word() -> None:
    assert len(NOVEL.texts) >= 20
    for prompts in BUILT_IN.values():
        assert len(set(prompts.texts)) == len(prompts.texts)
        assert all(text.isascii() and text == text.rstrip(" ") for text in prompts.texts)
    assert NOVEL.text(len(NOVEL.texts) + 1) == NOVEL.texts[1]
    assert all(text[-6:] in text[:-6] for text in COPYING.texts), "a lookup would find nothing"
