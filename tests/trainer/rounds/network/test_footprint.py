from dataclasses import replace
from pathlib import Path

import pytest

from onesweep.stages.errors import ConfigError
from onesweep.trainer.rounds.footprint import STATUS, measure, measure_workers
from tests.trainer.small import tiny


def test_layers_that_cannot_be_cut_are_told() -> None:
    with pytest.raises(ConfigError, match="4 layers cannot be cut into 3 equal blocks"):
        measure_workers(tiny, None, [3])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not STATUS.exists(), reason="there is no /proc")
def test_a_worker_process_is_measured(text_file: Path) -> None:
    (found,) = measure(tiny, text_file)
    assert found.peak > found.before > 2**20
    assert found.to_record()["held"] == found.peak - found.before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not STATUS.exists(), reason="there is no /proc")
def test_workers_that_pass_features_on_are_measured_together(text_file: Path) -> None:
    scorer = replace(tiny, rounds=replace(tiny.rounds, model="scorer", context_by="features"))
    found = measure(scorer, text_file)
    assert [each.part for each in found] == [0, 1]
    assert all(each.peak > each.before for each in found)
