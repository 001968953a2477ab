"""The ruler itself: human text must beat text that only pleases some figure."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from onesweep.loadtest.quality.prompts import Passage
from onesweep.loadtest.quality.run import CHEATS, cheat_texts
from onesweep.serving.cli.__main__ import main

PASSAGE = Passage(b"It was late when ", "she opened the door and said that she – well".encode())


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", "quality", "--check", *arguments]) == 0, capsys.readouterr().out
    return capsys.readouterr().out


def test_cheats_are_as_long_as_the_text_and_made_from_it() -> None:
    texts = {name: cheat_texts(name, [PASSAGE], 0)[0] for name in CHEATS}
    assert {len(text) for text in texts.values()} == {len(PASSAGE.continuation)}
    assert sorted(texts["shuffled words"].split()) == sorted(PASSAGE.continuation.split())
    assert sorted(texts["shuffled bytes"].decode()) == sorted(PASSAGE.continuation.decode())
    assert texts["copied prompt"].startswith(b"It was late when It was late")
    assert texts["repeated phrase"].startswith(b"she opened the door she opened")


def test_human_text_wins_with_the_ngram_judge(
    python_docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "check.json"), "--html", str(tmp_path / "check.html")]
    sizes = ["--count", "110", "--bytes", "192", "--judge", "ngram"]
    printed = checked(capsys, "--prompts", str(python_docs), *sizes, *files)
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["holds"]
    assert set(record["verdicts"]) == set(CHEATS)
    for name, one in record["verdicts"].items():
        assert f"holds: human text against {name}" in printed
        assert len(one["nearer"]) > 2 * len(one["farther"])
    assert (record["rows"][0]["auc"] is None) == (find_spec("sklearn") is None)
    page = (tmp_path / "check.html").read_text()
    assert all(name in page for name in CHEATS)


def test_a_check_needs_twice_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some words " * 100)
    arguments = ["bench", "quality", "--check", "--prompts", str(tmp_path), "--count", "3", "--judge", "ngram"]
    assert main(arguments) == 2
    assert "text for 6 passages, half of them for comparison; there is room for 3" in capsys.readouterr().err
    assert main([*arguments, "--modes", "ar"]) == 2
    assert "--check generates nothing: leave out --modes" in capsys.readouterr().err
