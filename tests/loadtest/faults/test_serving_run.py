"""Real processes under load, with faults: nothing is lost, and no text changes."""

from pathlib import Path

import pytest

from loadtest.faults.serving_run import chaos, chaos_record, verdict
from loadtest.faults.settings import ChaosSettings
from loadtest.lab.lab import lab_problem
from loadtest.workload.testbed import LOOPBACK
from tests.stages.pictures.tiny import TINY, tiny_picture_bundle

MODES = ("chunked", "resample", "ar")


@pytest.mark.slow
@pytest.mark.timeout(900)  # nine processes start in it, one after the other on a busy machine
def test_faults_cost_no_text(bundles: Path) -> None:
    """One ring for all kinds. Links are cut where a lab can be made."""
    has_links = not lab_problem()
    links = ("cut", "one-way", "slow-link") if has_links else ()
    kinds = ("freeze", "garbage", "half", "kill", "memory", "restart", "router", "slow", *links)
    settings = ChaosSettings(
        checkpoint=bundles / "scored",
        profile="links-20" if has_links else LOOPBACK,
        minutes=0.1,
        length_scale=0.25,
        warm_up_s=1.0,
        requests_at_once=2,
        seed=1,
        patience_s=120.0,
        faults=kinds,
        modes=MODES,
    )
    result = chaos(settings, lambda words: None)
    assert sorted(fault.kind for fault in result.faults) == sorted(kinds)
    assert result.trouble == 0, verdict(result)
    assert {result.cases[answer.case].mode for answer in result.answers} == set(MODES)
    assert sum(answer.replays for answer in result.answers) >= 1
    assert any(answer.tries for answer in result.answers), "the router's end cut off calls, which were made again"
    assert {"a-1", "a-2", "b-1", "b-2", "router"} == result.usages[0].keys() == result.usages[1].keys()
    everything = chaos_record(result)["modes"]["all"]
    assert everything["right"] == everything["requests"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_cost_no_picture(tmp_path: Path) -> None:
    settings = ChaosSettings(
        checkpoint=tiny_picture_bundle(tmp_path / "pictures"),
        profile=LOOPBACK,
        minutes=0.1,
        length_scale=0.25,
        warm_up_s=1.0,
        requests_at_once=2,
        patience_s=120.0,
        faults=("garbage", "kill"),
    )
    result = chaos(settings, lambda words: None)
    assert sorted(fault.kind for fault in result.faults) == ["garbage", "kill"]
    assert result.trouble == 0, verdict(result)
    assert {result.cases[answer.case].mode for answer in result.answers} == {"chain", "steps", "local"}
    assert {len(pixels) for pixels in result.texts} == {2 * TINY.height * TINY.width}
