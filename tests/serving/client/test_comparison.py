"""Several modes on one prompt: who is run, and the table and the page that show it."""

import html.parser
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import sync_playwright

from onesweep.serving.cli.generate import comparison_page
from onesweep.serving.client.client import Result
from onesweep.serving.client.comparison import Entrant, all_entrants, comparison, named_entrants
from onesweep.serving.client.result import result_of
from onesweep.serving.v1 import router_pb2
from onesweep.stages.errors import InputError, printable

Run = Callable[..., tuple[int, str, str]]
SERVED = ("sweep", "resample", "infill", "ar", "local")


def labels(entrants: list[Entrant]) -> list[str]:
    return [entrant.label for entrant in entrants]


def result(text: bytes, **changes: Any) -> Result:
    counted = {"seed": 1, "prompt_bytes": 3, "output_bytes": len(text), "prompt_tokens": 3, "output_tokens": 4}
    trips = {"sweeps": 1, "hops": 2, "wire_bytes": [10, 20], "wire_bytes_total": 30}
    times = {"latency_ms": 21.4, "first_byte_ms": 20.2, "compute_ms": 12.0}
    hosts = [router_pb2.HostShare(name="host-1", blocks=[0], compute_ms=12.0, queue_ms=1.0)]
    guessed = {"drafted": 4, "accepted": 1, "reached": 2}
    scored = {"scorer": "scorer", "chunk": 32, "candidates": 16, "effective_samples": 7.25, "divergence_bits": 0.31}
    summary = {"mode": "resample", **counted, **trips, **times, **guessed, **scored, **changes}
    return result_of(router_pb2.Summary(hosts=hosts, **summary), text)


# Who is run


def test_every_mode_is_run_with_every_scorer() -> None:
    assert labels(all_entrants(SERVED, None, "")) == ["sweep", "resample:scorer", "resample:ar", "ar", "local"]
    assert labels(all_entrants(SERVED, "ar", " end")) == ["sweep", "resample", "infill", "ar", "local"]
    assert labels(all_entrants(SERVED, None, " end"))[3:5] == ["infill:scorer", "infill:ar"]


def test_named_modes() -> None:
    assert labels(named_entrants(" ar, resample:ar ,ar")) == ["ar", "resample:ar"]
    with pytest.raises(InputError, match="--modes is empty"):
        named_entrants(" , ")
    with pytest.raises(InputError, match=r"unknown scorer 'oracle' in 'resample:oracle'; choose from scorer, ar"):
        named_entrants("resample:oracle")


# The table for terminals


@given(st.text(st.characters(codec=None), max_size=50))
def test_nothing_that_moves_a_cursor_gets_through(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)


def test_line_breaks_are_seen() -> None:
    assert printable("a\nb\x1b[2Jc\u202e\r") == "a⏎b�[2Jc��"
    assert printable("a\nb\x1b[2J", newline="\n") == "a\nb�[2J"


def test_what_follows_a_gap_is_shown_after_it() -> None:
    filled = result(b"sea", mode="infill")
    text = comparison("The ", {"infill:ar": filled, "sweep": result(b"sky", mode="sweep")}, " end")
    assert "  The |sea| end" in text
    assert text.splitlines()[2].startswith("infill:ar  "), "a scorer in the label is no other mode"
    assert text.endswith("  The |sky")


def test_a_mode_that_failed_stands_among_the_others() -> None:
    lines = comparison("The ", {"sweep": result(b"sea\x1b", mode="sweep"), "ar": "host-2 is lost"}).splitlines()
    assert lines[0].startswith("mode")
    assert lines[0].endswith("host-seconds")
    assert lines[2].split() == ["sweep", "21", "ms", "20", "ms", "1", "2", "30", "12", "ms", "0.012"]
    assert lines[3].split(maxsplit=1) == ["ar", "host-2 is lost"]
    assert lines[-1] == "  The |sea�"


# The page


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.links: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_has_every_text_and_figure_and_needs_no_other_file() -> None:
    outcomes: dict[str, Result | str] = {
        "resample:scorer": result(b"sea \xff\x00 wide"),
        "auto": result(b"wave", mode="sweep", reason="within 300 ms"),
        "ar": "host-2 is lost",
    }
    page = Page(comparison_page("The <b>", "", outcomes, {"max_bytes": 8, "chunk": None, "suffix": ""}))
    for words in ("sea �� wide", "wave", "within 300 ms", "host-2 is lost", "The <b>", "21.4", "7.2", "0.310", "0.50"):
        assert words in page.words, words
    assert "max_bytes" in page.words
    assert "chunk" not in page.words.partition("setting")[2], "settings that nobody made are not shown"
    assert not page.links
    assert not {"script", "b", "img", "link"} & set(page.tags)


def test_the_page_names_command_date_and_version() -> None:
    words = Page(comparison_page("The sea", "", {"ar": result(b"s"), "sweep": result(b"t")}, {"seed": 3})).words
    assert "onesweep compare 'The sea' --modes ar,sweep --seed 3" in words
    assert f"{datetime.now(UTC):%Y-%m-}" in words
    assert f"onesweep {version('onesweep')}" in words


def test_the_page_fits_1100_pixels(chromium: str, tmp_path: Path) -> None:
    full = {"mode": "resample", "scorer": "scorer", "chunk": 32, "candidates": 1024, "effective_samples": 312.4}
    costs = {"divergence_bits": 0.123, "wire_bytes_total": 123_456_789, "latency_ms": 123_456.7, "reason": "r " * 99}
    modes: dict[str, Result | str] = {
        "resample:scorer": replace(result(b"sea " * 64), **full, **costs),
        "auto": replace(result(b"x" * 256), **{**full, **costs, "mode": "ar-speculative"}),
    }
    (tmp_path / "page.html").write_text(
        comparison_page("The sea " * 40, "", modes, {"max_bytes": 256, "seed": 1 << 60})
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.goto((tmp_path / "page.html").as_uri())
        hidden = "[...document.querySelectorAll('html, .wide')].map((each) => each.scrollWidth - each.clientWidth)"
        assert page.evaluate(hidden) == [0, 0, 0]
        assert page.locator("th").count() == 16
        page.set_viewport_size({"width": 375, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        browser.close()


def test_the_page_shows_what_follows_a_gap() -> None:
    outcomes: dict[str, Result | str] = {"infill": result(b"sea", mode="infill"), "ar": result(b"sky", mode="ar")}
    page = comparison_page("The ", " is wide", outcomes, {})
    assert page.count(" is wide</span></p>") == 1


hostile = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["<script>alert(1)</script>", "</p></article>", "&lt;", '"><img src=x>', "<!--"]
)


@given(hostile, hostile, st.binary(max_size=30), hostile)
def test_nothing_that_is_given_becomes_a_tag(prompt: str, suffix: str, text: bytes, error: str) -> None:
    outcomes: dict[str, Result | str] = {"infill": result(text, mode="infill", reason=prompt), prompt: error}
    plain: dict[str, Result | str] = {"infill": result(b"", mode="infill", reason="r"), "x": "e"}
    page = comparison_page(prompt, suffix, outcomes, {"suffix": suffix, "seed": 1})
    expected = comparison_page("x", "y" if suffix else "", plain, {"suffix": "y" if suffix else "", "seed": 1})
    tags = Page(page).tags
    assert tags == Page(expected).tags or (not prompt and len(tags) == len(Page(expected).tags) - 1)
    page.encode()


# From the command line


def test_compare_writes_a_page(bundles: Path, local_ring: Any, onesweep: Run, tmp_path: Path) -> None:
    with local_ring(bundles / "scored", 1) as client:
        router = ("--router", client.address, "--max-bytes", 6)
        path = tmp_path / "page.html"
        code, out, err = onesweep("compare", "The sea ", "--suffix", " end", "--html", path, *router)
        assert (code, err) == (0, "")
        words = Page(path.read_text()).words
        for label in (
            "sweep",
            "resample:scorer",
            "verified:ar",
            "infill:scorer",
            "infill:ar",
            "ar-speculative",
            "local",
        ):
            assert f"{label}:\n  The sea |" in out, label
            assert label in words, label
        assert out.count("| end") == 2
        code, out, err = onesweep("compare", "x", "--html", tmp_path / "none" / "page.html", *router)
        assert (code, out) == (2, "")
        assert "choose another --html FILE" in err
        code, out, err = onesweep("compare", "x", "--modes", "infill", *router)
        assert code == 2
        assert "give one (--suffix)" in err
        code, out, err = onesweep("generate", "The ", "--mode", "infill", "--suffix", " sea", *router)
        assert code == 0
        assert "[infill, seed 0: 6 bytes, 1 sweeps" in err


def test_a_scorer_that_is_not_served_is_left_out(bundles: Path, local_ring: Any, onesweep: Run) -> None:
    with local_ring(bundles / "own", 1) as client:
        code, out, _ = onesweep("compare", "x", "--max-bytes", 4, "--router", client.address)
        assert code == 0
        assert "resample:ar" in out
        assert "resample:scorer" not in out
        code, out, _ = onesweep(
            "compare", "x", "--modes", "resample:scorer,local", "--max-bytes", 4, "--router", client.address
        )
        assert code == 1
        assert "scorer 'scorer' cannot be served" in out
