"""The report: one file, nothing fetched, every row in it."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from onesweep.loadtest.latency.floor import Course
from onesweep.loadtest.latency.interleave import Sample
from onesweep.loadtest.latency.report import report
from onesweep.loadtest.latency.rows import row_of, single_sweep, waterfall
from onesweep.loadtest.workload.arms import Arm, Length, ModeChoice

pytest.importorskip("matplotlib")
Make = Callable[..., Sample]
SWEEP, AR = ModeChoice("sweep"), ModeChoice("ar", "int8")


@pytest.fixture
def record(sample: Make, course: Course) -> dict[str, Any]:
    rows = [
        row_of("wan-<50>", Arm(choice, Length(size), idle_s), [sample(100.0 * size), sample(error="<lost>")])
        for choice in (SWEEP, AR)
        for size in (8, 32)
        for idle_s in (0.0, 5.0)
    ]
    rows.append(row_of("dead", Arm(SWEEP, Length(8)), [sample(error="never ready")]))
    return {
        "bench": "wan",
        "command": "onesweep bench wan --profile 'wan-<50>'",
        "commit": "0123456789abcdef",
        "machine": {"processor": "A & B", "cores": 2, "system": "Linux", "torch": "2", "onnxruntime": None},
        "settings": {"hosts": 2, "requests": 2, "at_once": 1, "seed": 7, "choices": ["sweep", "ar:int8"]},
        "rows": rows,
        "links": [
            {
                "profile": "wan-<50>",
                "source": "router",
                "destination": "host-1",
                "nominal_ms": 20.0,
                "p50_ms": 20.4,
                "least_ms": 20.1,
                "most_ms": 22.0,
            }
        ],
        "control": [row_of("loopback", Arm(SWEEP, Length(8)), [sample(90.0)])],
        "sweep": single_sweep("wan-<50>", course, Arm(SWEEP, Length(8)), [sample(100.0)]),
        "samples": [],
    }


class Reader(HTMLParser):
    """Tags that are open, and attributes that would fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.pictures += tag == "svg"
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...


def test_one_page_with_everything(record: dict[str, Any]) -> None:
    page = report(record)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.fetched == []
    assert reader.pictures == 4
    assert not re.search(r"url\((?!#)|@import|<script", page)
    for text in ("wan-&lt;50&gt;", "A &amp; B", "&lt;lost&gt;", "0123456789ab", "seed"):
        assert text in page
    assert "<lost>" not in page
    assert "No request ended well" in page


def test_text_is_drawn_in_the_page_s_own_colour(record: dict[str, Any]) -> None:
    page = report(record)
    assert "currentColor" in page
    assert "#010203" not in page


def test_a_page_without_the_rest(record: dict[str, Any]) -> None:
    page = report(record | {"sweep": None, "control": [], "links": []})
    assert "no lab" in page
    assert "What the lab itself costs" not in page
    assert "What each measure is worth" not in page
    assert "hop by hop" not in page


def test_the_waterfall_adds_up(record: dict[str, Any]) -> None:
    steps = waterfall(record["sweep"])
    assert sum(took_ms for _, _, took_ms in steps) == pytest.approx(100.0)
    assert [part for _, part, _ in steps] == [
        *("delay", "serialisation", "queue", "compute"),
        *("delay", "serialisation", "queue", "compute"),
        *("delay", "serialisation", "rest"),
    ]
    assert steps[1] == ("1,250 bytes", "serialisation", 10.0)


def test_only_a_single_warm_sweep_is_drawn(sample: Make, course: Course) -> None:
    warm, idle = Arm(SWEEP, Length(8)), Arm(SWEEP, Length(8), 5.0)
    assert single_sweep("wan", course, idle, [sample()]) is None
    assert single_sweep("wan", course, warm, [sample(sweeps=2)]) is None
    assert single_sweep("wan", course, warm, [sample(error="lost")]) is None
    drawn = single_sweep("wan", course, warm, [sample(300.0), sample(100.0), sample(200.0), sample(error="lost")])
    assert drawn is not None
    assert drawn["latency_ms"] == 200.0
