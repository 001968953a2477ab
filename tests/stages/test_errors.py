"""Errors: their tree in the module's docstring, and what the system refuses."""

import inspect
import re
from pathlib import Path

import pytest

from stages import errors


def test_the_documented_tree_matches_the_classes() -> None:
    classes = dict(inspect.getmembers(errors, lambda o: inspect.isclass(o) and o.__module__ == errors.__name__))
    parents: list[str] = []
    seen = set()
    for line in errors.__doc__.splitlines():
        entry = re.fullmatch(r"([| +-]*)([A-Z]\w+)(?: .*)?", line)
        if entry is None or entry[2] not in classes:
            continue
        depth = len(entry[1]) // 3
        parents = [*parents[:depth], entry[2]]
        assert [c.__name__ for c in classes[entry[2]].__mro__[1 : depth + 1]] == parents[:-1][::-1]
        code = re.search(r"exit (\d+)", line)
        if code:
            assert classes[entry[2]].exit_code == int(code[1])
        seen.add(entry[2])
    assert seen == classes.keys()


def test_a_path_that_cannot_be_looked_at_is_not_absent(tmp_path: Path) -> None:
    assert errors.exists(tmp_path)
    assert not any(map(errors.exists, (tmp_path / "none", Path(__file__) / "none")))
    with pytest.raises(OSError, match="File name too long"):
        errors.exists(tmp_path / ("x" * 300))
