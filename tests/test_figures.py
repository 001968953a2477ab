"""A measured figure of README or docs stands in docs/results.json, beside its command, commit and machine."""

from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).resolve().parents[1]

PAGES = figures.load()["places"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_the_measured_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert figures.written(text, PAGES[page], figures.values()) == text, "run `python .ci/figures.py write`"


@pytest.mark.parametrize("name", figures.load()["measured"])
def test_a_result_names_its_command_commit_machine_and_date(name: str) -> None:
    entry = figures.load()["measured"][name]
    assert entry["command"].startswith("onesweep ")
    assert len(entry["commit"]) >= 7
    assert entry["machine"]
    assert entry["date"] >= "2026-11-23"
    assert entry["values"]


def test_a_result_of_a_removed_command_is_shown_with_its_commit() -> None:
    shown = {name: page for page, places in PAGES.items() for place in places for name in place["figures"]}
    for name, entry in figures.load()["measured"].items():
        if name in figures.MEASUREMENTS and entry["command"] == figures.MEASUREMENTS[name].command:
            continue
        pages = {shown[f"{name}.{key}"] for key in entry["values"]}
        assert all("at commit" in (ROOT / page).read_text() for page in pages), (name, pages)


def test_new_values_keep_the_decimals_of_the_page() -> None:
    page = "| mode | ms | times |\n|---|---|---|\n| `ar`, 16 tokens | 8.8 | 1,000 |\nover 60 ms, 7 times"
    places = [
        {"table": "| mode | ms | times |", "row": "| `ar`, # tokens | # | # |", "figures": [None, "a.ms", "a.many"]},
        {"table": "", "row": "over # ms, # times", "figures": [None, "a.few"]},
    ]
    known = {"a.ms": 9.26, "a.many": 2255.0, "a.few": 3.0}
    assert figures.written(page, places, known) == page.replace("8.8", "9.3").replace("1,000", "2,255").replace(
        "7", "3"
    )


def test_a_missing_place_on_a_page_is_named() -> None:
    with pytest.raises(KeyError, match="over # ms"):
        figures.written("nothing", [{"table": "", "row": "over # ms", "figures": ["a.ms"]}], {"a.ms": 1.0})
