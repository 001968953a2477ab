"""A flood on a small deployment, and what is made of its figures."""

from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from onesweep.loadtest.faults.flood import FloodResult, FloodSettings, flood_notes, flood_record, in_common, run_flood
from onesweep.loadtest.load.accounting import figures_of
from onesweep.loadtest.load.generator import Recording
from onesweep.loadtest.load.plan import LoadSettings, Window
from onesweep.loadtest.load.run import LoadResult
from onesweep.loadtest.workload.prompts import seeded_prompts
from onesweep.loadtest.workload.testbed import TestbedSettings, open_testbed
from onesweep.loadtest.workload.texts import Texts
from onesweep.stages.errors import ServiceError


@pytest.mark.slow
def test_a_full_router_refuses_and_what_it_answers_is_right(bundle: Path) -> None:
    if find_spec("locust") is None:  # not imported: that would change this whole process
        pytest.skip("locust is not installed (extra `loadtest`)")
    target_settings = TestbedSettings(
        checkpoint=bundle, hosts=1, router_options=("--max-requests", "2", "--max-waiting", "0")
    )
    with open_testbed(target_settings) as target:
        texts = Texts(target, seeded_prompts(4, 0, 8, 96), 8)
        for seconds in (3.0, 9.0, 27.0):  # a busy machine starts the crowds seconds apart
            load = LoadSettings(target_settings, "ar", 1, seconds, max_bytes=8, cases=4, warm_up_s=0.2)
            with suppress(ServiceError):
                flood = FloodSettings(load, at=6.0, knee=1, polite=1, batch=True)
                result = run_flood(flood, target, texts, lambda result: None)
                if result.flood.figures.counts.refused and all(each.figures.counts.right for each in result.results):
                    break
    assert [each.users for each in result.results] == [1, 1, 6, 1, 6, 1]
    assert result.trouble == 0
    assert result.flood.figures.counts.refused > 0
    assert result.flood.figures.counts.right > 0
    assert result.goodput > 0
    assert result.polite_share is not None
    assert "refusals after" in "\n".join(flood_notes(result))
    assert result.interactive is not None
    assert result.interactive.figures.counts.refused == 0, "a batch request made room"
    assert "ms beside the flood as batch requests" in flood_notes(result)[-1]
    assert flood_record(result)["polite"]["users"] == 1


def test_crowds_are_judged_over_the_time_that_they_share() -> None:
    first, second = (Recording([], Window(begin_s, begin_s + 10.0, 2.0)) for begin_s in (100.0, 104.0))
    assert [each.window for each in in_common([first, second])] == [Window(104.0, 110.0, 1.2)] * 2
    assert in_common([first, Recording()]) == [first, Recording()]
    with pytest.raises(ServiceError, match=r"there together for 4\.0 s only"):
        in_common([first, Recording([], Window(106.0, 116.0, 2.0))])
    with pytest.raises(ServiceError, match=r"0\.0 s only"):
        in_common([first, Recording([], Window(200.0, 210.0, 2.0))])


def run(rate: float, refusal_p95_ms: float | None = None) -> LoadResult:
    figures = figures_of([], Window(0.0, 1.0, 0.1), 8)
    return LoadResult("ar", 1, replace(figures, throughput_rps=rate, refusal_p95_ms=refusal_p95_ms), [], "")


@pytest.mark.parametrize(
    ("rate", "refusal_p95_ms", "missed"),
    [(9.0, None, 0), (9.0, 49.0, 0), (8.9, 49.0, 1), (9.0, 50.0, 1), (0.0, 90.0, 2)],
)
def test_aims_that_are_missed_are_named(rate: float, refusal_p95_ms: float | None, missed: int) -> None:
    settings = FloodSettings(LoadSettings(TestbedSettings()), 10.0, 1, 0)
    assert len(FloodResult(settings, run(10.0), None, run(rate, refusal_p95_ms), None).missed) == missed
