"""The rules of .ci/house.py hold for this tree, and each of them can be broken."""

import subprocess
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_every_rule(rule) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize("count", house.counts(ROOT), ids=lambda count: count.name)
def test_the_tree_does_not_grow(count) -> None:
    assert count.kept, str(count)


BREAKING = [
    (house.nameless_files, "serving/utils.py", "", "serving/utils.py: name it"),
    (house.silent_tests, "tests/test_nothing.py", "def test_it():\n    print('fine')", "tests/test_nothing.py asserts"),
    (house.mannered_prose, "stages/a.py", '"""Whoever reads this."""', "stages/a.py:1: "),
    (house.slow_patterns, "stages/a.py", r"import re; re.match(r'<t>(\"(\\\\.|[^\"])*\"|.)*?', 'x')", "may be slow"),
    (house.mannered_prose, "docs/a.md", "What came of it.", "docs/a.md:1: "),
]


@pytest.mark.parametrize(("rule", "file", "text", "message"), BREAKING)
def test_a_broken_rule_is_reported(tmp_path: Path, rule, file: str, text: str, message: str) -> None:
    for name, content in {
        "stages/b.py": "import stages.a",
        "stages/host/host.py": "",
        "serving/cli/__main__.py": "",
        "trainer/__init__.py": "",
        file: text,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    broken = rule(tmp_path)
    assert broken
    assert all(line.startswith(message) or message in " ".join(broken) for line in broken)


def test_an_unknown_top_level_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "misc").mkdir()
    (tmp_path / "misc/notes.md").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    assert house.stray_folders(tmp_path) == ["misc/: no such room at the top level"]
