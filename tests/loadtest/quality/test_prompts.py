"""Prompts and their files, places, characters."""

from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.quality.text import cut_prompts, held_out_documents
from stages.errors import InputError

TEXT = "".join(f"{i:05d}äöü–" for i in range(3000)).encode()


def test_prompts_are_cut_between_characters_evenly_and_without_overlap() -> None:
    places = []
    for passage in cut_prompts([TEXT], 20, 30, 50):
        whole = passage.prompt + passage.continuation
        whole.decode()
        passage.prompt.decode()
        assert 27 <= len(passage.prompt) <= 30
        assert 47 <= len(passage.continuation) <= 53
        places.append((TEXT.index(whole), TEXT.index(whole) + len(whole)))
    assert len(places) == 20
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    gaps = [b - a for (a, _), (b, _) in pairwise(places)]
    assert max(gaps) < 2 * min(gaps)


def test_prompts_depend_on_the_seed() -> None:
    same = cut_prompts([TEXT], 20, 30, 47)
    assert cut_prompts([TEXT], 20, 30, 47) == same
    assert cut_prompts([TEXT], 20, 30, 47, seed=1) != same


def test_held_out_text_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("words")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert held_out_documents(tmp_path) == [b"words"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text(f"train {name}")
        (tmp_path / name / "valid.txt").write_text(f"valid {name}")
    assert held_out_documents(tmp_path) == [b"valid one", b"valid two"]


def test_unusable_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no text at .*missing"):
        held_out_documents(tmp_path / "missing")
    (tmp_path / "bad.txt").write_bytes(b"fine\xff")
    with pytest.raises(InputError, match=r"bad.txt is not UTF-8 \(byte 4\)"):
        held_out_documents(tmp_path)
    (tmp_path / "bad.txt").write_text(" \n")
    with pytest.raises(InputError, match="is empty: --prompts needs text"):
        held_out_documents(tmp_path)
