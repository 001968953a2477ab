"""Prompts of our own, and a user's."""

from pathlib import Path

import pytest

from loadtest.workload.prompts import BUILT_IN, COPYING, NOVEL, parse_prompts
from stages.errors import InputError


def test_ours_are_enough_different_and_end_where_a_word_does() -> None:
    assert len(NOVEL.texts) >= 20
    for prompts in BUILT_IN.values():
        assert len(set(prompts.texts)) == len(prompts.texts)
        assert all(text.isascii() and text == text.rstrip(" ") for text in prompts.texts)
    assert NOVEL.text(len(NOVEL.texts) + 1) == NOVEL.texts[1]


@pytest.mark.parametrize("text", COPYING.texts)
def test_what_is_to_be_copied_stands_in_the_prompt(text: str) -> None:
    ending = text[-6:]
    assert ending in text[:-6], "a lookup would find nothing"


def test_names_and_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    assert parse_prompts("", []) == (NOVEL,)
    assert parse_prompts("copying, novel", []) == (COPYING, NOVEL)
    (files,) = parse_prompts("", [tmp_path / "a"])
    assert files.texts == ("one\ntwo",)
    assert [prompts.name for prompts in parse_prompts("novel", [tmp_path / "a"])] == ["novel", "files"]


@pytest.mark.parametrize(
    ("names", "content", "says"),
    [
        ("old", None, "unknown text 'old' in --text; choose from novel, copying, or give --prompt"),
        ("novel,novel", None, "--text names 'novel' twice"),
        (",", None, "--text is empty"),
        ("", b"\n\n", "is empty: --prompt takes files of text"),
        ("", b"\xff", "is not UTF-8 (byte 0)"),
        ("", b"x" * ((1 << 20) + 1), "has more than 1048576 bytes"),
    ],
)
def test_refused_with_a_sentence(tmp_path: Path, names: str, content: bytes | None, says: str) -> None:
    files = [tmp_path / "a"] if content is not None else []
    if content is not None:
        files[0].write_bytes(content)
    with pytest.raises(InputError) as caught:
        parse_prompts(names, files)
    assert says in str(caught.value)
