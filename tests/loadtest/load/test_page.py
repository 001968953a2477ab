"""The report: every number of the table in it, one picture, nothing from elsewhere, no markup from outside."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from onesweep.loadtest.load.accounting import Counts, LoadFigures, figures_of, judge
from onesweep.loadtest.load.plan import LoadSample, LoadSettings, Window
from onesweep.loadtest.load.report import RUNS, knee_page, knee_record, load_page, load_record, run_notes
from onesweep.loadtest.load.run import Climb, LoadResult, LoadRun
from onesweep.loadtest.report.page import shown
from onesweep.loadtest.report.record import this_command, this_machine
from onesweep.loadtest.workload.caller import Access, RouterState
from onesweep.loadtest.workload.testbed import Network, Testbed, TestbedSettings

WINDOW = Window(0.0, 10.0, 0.5)
SAMPLES = [
    *(LoadSample(0, i / 10, i / 10 + 0.2 + i / 1000, "OK", output=b"x".hex()) for i in range(90)),
    LoadSample(0, 3.0, 3.002, "RESOURCE_EXHAUSTED", False, 1000),
    LoadSample(0, 4.0, 4.5, "UNAVAILABLE", message="<b>host-2</b> is lost"),
    LoadSample(0, 5.0, 9.0, "OPEN"),
    LoadSample(0, 6.0, 6.3, "OK", output=b"y".hex()),
]


@pytest.fixture(autouse=True)
def needs_matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")


@pytest.fixture
def scene() -> LoadRun:
    facts = RouterState(True, "", ["sweep"], 3, 512, 64)
    target = Testbed(Access("127.0.0.1:7700"), Network("lan", 3, 7700))
    return LoadRun(LoadSettings(TestbedSettings()), target, facts)


def result() -> LoadResult:
    judged = judge(SAMPLES, WINDOW, {0: b"x"})
    return LoadResult("sweep", 8, figures_of(judged, WINDOW, 16), judged, "the same models", "prompt 'x'")


def picture_of(page: str) -> str:
    assert page.count("<svg") == page.count("</svg>") == 1
    picture = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    return "".join(ET.fromstring(picture).itertext())


def test_the_page_of_a_run(scene: LoadRun) -> None:
    page, words = load_page(scene, result()), picture_of(load_page(scene, result()))
    assert all(f">{cell}</td>" in page for cell in RUNS.cells([result()])[0])
    assert all(label in words for label in ("p50", "p95", "p99 289 ms", "refused", "failed", "lost", "wrong"))
    assert shown(this_command()) in page
    assert shown(this_machine().processor) in page
    assert "<b>host-2" not in page
    assert "&lt;b&gt;host-2&lt;/b&gt; is lost" in page
    assert "prompt &#x27;x&#x27;" in page


def test_the_page_of_a_climb_has_every_mode_in_one_picture(scene: LoadRun) -> None:
    def level(mode: str, users: int, rate: float, p95_ms: float) -> LoadResult:
        figures = replace(result().figures, throughput_rps=rate, p95_ms=p95_ms, p50_ms=p95_ms / 2)
        return LoadResult(mode, users, figures, [], "")

    climbs = [
        Climb("sweep", [level("sweep", 1, 9, 100), level("sweep", 2, 17, 110), level("sweep", 4, 18, 300)], 2, "p95"),
        Climb("ar", [level("ar", 1, 1, 900), level("ar", 2, 1.9, 1000)], 2, ""),
        Climb("chunked", [LoadResult("chunked", 1, nothing(), [], "")], None, "no request was answered"),
    ]
    page = knee_page(scene, climbs)
    words = picture_of(page)
    assert all(f"{mode}, {percent}" in words for mode in ("sweep", "ar") for percent in ("p50", "p95"))
    assert "chunked" not in words
    assert "chunked: no knee: no request was answered" in page
    record = knee_record(scene, climbs)
    assert [(knee["mode"], knee["users"]) for knee in record["knees"]] == [("sweep", 2), ("ar", 2), ("chunked", None)]
    assert len(record["rows"]) == 6


def nothing() -> LoadFigures:
    return LoadFigures(Counts(), Counts(), 10.0, 0.0, 0.0, None, None, None, None, None, None, 0.1, {})


def test_a_run_without_answers_has_a_page(scene: LoadRun) -> None:
    empty = LoadResult("sweep", 1, nothing(), [], "")
    assert "<td>-</td>" in load_page(scene, empty)


def test_the_record_has_the_keys_that_are_promised(scene: LoadRun) -> None:
    record = load_record(scene, result())
    counts = {"requests": 94, "right": 90, "refused": 1, "failed": 1, "lost": 1, "wrong": 1, "cut": 0}
    assert {key: record[key] for key in counts} == counts
    figures = {"throughput_rps", "output_bytes_per_s", "p50_ms", "p95_ms", "p99_ms", "users", "seconds", "mode"}
    assert figures <= set(record)
    assert (record["profile"], record["refusal_p95_ms"], record["retry_after_ms"]) == ("lan", pytest.approx(2.0), 1000)


def test_notes_say_what_the_table_has_no_room_for() -> None:
    notes = "\n".join(run_notes(result()))
    assert "refusals came after 2.0 ms (p50), 2.0 ms (p95) and said to come back in 1,000.0 ms" in notes
    assert "failed 1 x: UNAVAILABLE: <b>host-2</b> is lost" in notes
    assert "the load generator took 0.05 of one of" in notes
