"""A measured figure of README or docs stands in docs/results.json, beside its command, commit and machine."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("figures", ROOT / ".ci/figures.py")
assert _spec is not None
assert _spec.loader is not None
figures = importlib.util.module_from_spec(_spec)
sys.modules["figures"] = figures  # dataclasses look their module up by name
_spec.loader.exec_module(figures)

PAGES = pytest.mark.parametrize("page", figures.pages(), ids=lambda page: str(page.relative_to(ROOT)))


@PAGES
def test_the_figures_of_a_page_are_those_that_were_measured(page: Path) -> None:
    text = page.read_text()
    assert figures.written(text, figures.values()) == text, "run `python .ci/figures.py write`"


@PAGES
def test_a_figure_without_a_name_is_a_setting_that_is_listed(page: Path) -> None:
    """Limits and defaults look like figures: whoever writes one says so in `settings`."""
    listed = Counter(figures.load()["settings"].get(str(page.relative_to(ROOT)), []))
    found = Counter(figures.unmarked(page.read_text()))
    assert found.keys() - listed.keys() == set(), "give it a name (see .ci/figures.py), or list it under `settings`"
    assert listed.keys() - found.keys() == set(), "take it out of `settings`: the page has it no longer"


@pytest.mark.parametrize("name", figures.load()["measured"])
def test_a_result_names_what_made_it(name: str) -> None:
    entry = figures.load()["measured"][name]
    assert entry["command"].startswith("onesweep ")
    assert len(entry["commit"]) >= 7
    assert entry["machine"]
    assert entry["date"] >= "2026-11-23"
    assert entry["values"]


def test_a_page_takes_new_values_with_its_own_decimals() -> None:
    page = "takes 8.8<!--a.ms--> ms, {a.many:,.0f} times; 60 ms links"
    assert figures.written(page, {"a.ms": 9.26, "a.many": 2255.0}) == (
        "takes 9.3<!--a.ms--> ms, 2,255<!--a.many--> times; 60 ms links"
    )
    assert list(figures.unmarked("takes 8.8<!--a.ms--> ms, over 60 ms, `5 ms`, 72 to 91 % and 1.4 x\n| 0.7 |")) == [
        "60 ms",
        "91 %",
        "1.4 x",
        "0.7",
    ]
