"""The table for terminals."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serving.client.client import Result
from serving.client.comparison import comparison, printable
from serving.client.result import HostShare


def result(text: str) -> Result:
    share = HostShare("host-1", [0], 12.0, 1.0)
    return Result(
        text,
        "sweep",
        1,
        3,
        4,
        3,
        4,
        False,
        1,
        2,
        [10, 20],
        30,
        21.4,
        20.2,
        12.0,
        [share],
        0,
        0,
        0,
        output=text.encode(),
    )


@given(st.text(st.characters(codec=None), max_size=50))
def test_nothing_that_moves_a_cursor_gets_through(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)


def test_line_breaks_are_seen() -> None:
    assert printable("a\nb\x1b[2Jc\u202e\r") == "a⏎b�[2Jc��"
    assert printable("a\nb\x1b[2J", newline="\n") == "a\nb�[2J"


def test_what_follows_a_gap_is_shown_after_it() -> None:
    filled = replace(result("sea"), mode="infill")
    text = comparison("The ", {"infill:ar": filled, "sweep": result("sky")}, " end")
    assert "  The |sea| end" in text
    assert text.splitlines()[2].startswith("infill:ar  "), "a scorer in the label is no other mode"
    assert text.endswith("  The |sky")


def test_a_mode_that_failed_stands_among_the_others() -> None:
    lines = comparison("The ", {"sweep": result("sea\x1b"), "ar": "host-2 is lost"}).splitlines()
    assert lines[0].startswith("mode")
    assert lines[0].endswith("host-seconds")
    assert lines[2].split() == ["sweep", "21", "ms", "20", "ms", "1", "2", "30", "12", "ms", "0.012"]
    assert lines[3].split(maxsplit=1) == ["ar", "host-2 is lost"]
    assert lines[-1] == "  The |sea�"
