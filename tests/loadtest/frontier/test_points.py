"""Points, budgets, and what is said of `auto`; the picture and the tables of them."""

from typing import Any
from xml.etree import ElementTree

import pytest

from onesweep.loadtest.frontier.points import (
    AutoPoint,
    Point,
    auto_point_of,
    parts_of,
    point_of,
    usual_budgets_ms,
    with_pareto,
)
from onesweep.loadtest.frontier.report import AUTO, failures, frontier_picture, points_table
from onesweep.loadtest.frontier.worth import Worth
from onesweep.loadtest.latency.interleave import Sample
from onesweep.loadtest.quality.generation import parse_arm
from onesweep.loadtest.quality.panel import JUDGED
from onesweep.serving.modes import MODES

PROFILE = "links-60"


def answer(latency_ms: float, reason: str = "", **changes: Any) -> Sample:
    account = {
        "sweeps": 4,
        "output_tokens": 100,
        "hosts": [{"compute_ms": 30.0}],
        "compute_ms": 50.0,
        "ahead_ms": 0.0,
        "batches": 1,
        "wire_bytes_total": 5000,
        "reason": reason,
        **changes,
    }
    return Sample(0, 0, latency_ms, account=account)


def point(spec: str, bits: float, *seconds: float, error: str = "") -> Point:
    answers = [answer(1000 * s) for s in seconds] + ([Sample(0, error=error)] if error else [])
    return point_of(PROFILE, Worth(parse_arm(spec, MODES), bits, bits - 0.1, bits + 0.1), answers)


def points() -> list[Point]:
    return with_pareto(
        [
            point("local", 3.0, 0.3),
            point("sweep", 4.0, 0.5),
            point("resample:scorer:chunk=32:candidates=8", 2.5, 1.9, 2.0, 2.3),
            point("ar", 2.4, 20.0),
            point("verified:ar", 2.4, error="no weights"),
        ]
    )


def test_a_point() -> None:
    made = points()[2]
    assert (made.seconds, made.seconds_p95, made.sweeps, made.requests) == (2.0, 2.3, 4.0, 3)
    assert (made.host_seconds, made.router_seconds) == pytest.approx((0.03, 0.02))
    failed = points()[4]
    assert (failed.seconds, failed.failures, failed.error, failed.pareto) == (None, 1, "no weights", False)


def test_what_nothing_beats() -> None:
    assert [p.mode for p in points() if p.pareto] == ["local", "resample", "ar"]


def test_budgets_lie_between_the_points() -> None:
    assert usual_budgets_ms(points()) == (775, 6325, 26000)
    assert usual_budgets_ms([]) == ()


def test_who_wrote_a_text() -> None:
    assert parts_of("ar:temperature=1.0 with 2.400 judge bits ...", 100) == {"ar:temperature=1.0": 100}
    reason = "resample:ar with 2 ...; after 64 of 100 bytes 30 ms were left, so local wrote the rest"
    assert parts_of(reason, 100) == {"resample:ar": 64, "local": 36}


def test_a_budget_that_was_kept() -> None:
    made = auto_point_of(PROFILE, 2400, [answer(2200, "resample:scorer:chunk=32:candidates=8 with")] * 2, points())
    assert (made.kept, made.as_good, made.best_fixed) == (True, True, "resample:scorer:chunk=32:candidates=8")
    assert made.worst == pytest.approx(2200 / 2400)
    assert made.picked == {"resample:scorer:chunk=32:candidates=8": 2}


def test_a_budget_that_was_not_kept_and_a_worse_text() -> None:
    reason = "sweep with 4; after 50 of 100 bytes 1 ms were left, so local wrote the rest"
    made = auto_point_of(PROFILE, 1000, [answer(900, "local with"), answer(1200, reason)], points())
    assert (made.kept, made.hurried, made.as_good) == (False, 1, False)
    assert made.bits == pytest.approx((3 * 100 + 4 * 50 + 3 * 50) / 200)
    refused = auto_point_of(PROFILE, 1, [Sample(0, error="below one sweep")], points())
    assert (refused.kept, refused.as_good, refused.best_fixed) == (None, None, None)


def test_the_tables() -> None:
    text = points_table(points(), 1.5)
    assert "| `ar` | 4 | **20.00** | 2.400 ± 0.100 | - | 0.03 | 0.02 |" in text.splitlines()
    assert "| `sweep` | 4 | 0.50 | 4.000 ± 0.100 | - | 0.03 | 0.02 |" in text.splitlines()
    assert text.splitlines()[-1].startswith("| human text |")
    assert failures(points()) == ["links-60, verified:ar: 1 of 1 failed, such as: no weights"]
    auto = [auto_point_of(PROFILE, 500, [answer(400, "local with")], points())]
    assert "| links-60 | local (1) | 0.50 | 0.40 | 0.80 | yes | 3.000 | local | 3.000 |" in AUTO.markdown(auto)


@pytest.mark.parametrize("auto", [True, False])
def test_the_picture(auto: bool) -> None:
    pytest.importorskip("matplotlib")
    budgets = [auto_point_of(PROFILE, 500, [answer(400, "local with")], points())] if auto else []
    svg = frontier_picture(points(), budgets, 1.5, JUDGED, "judge")
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "<text" not in svg  # paths: it looks alike everywhere
    assert svg == frontier_picture(points(), budgets, 1.5, JUDGED, "judge")


def test_a_picture_of_nothing() -> None:
    pytest.importorskip("matplotlib")
    nothing: list[AutoPoint] = []
    ElementTree.fromstring(frontier_picture([point("ar", 2.0, error="lost")], nothing, None, JUDGED, "judge"))
