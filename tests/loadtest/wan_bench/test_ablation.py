"""One change against none: pairs, and changes that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.wan_bench.ablation import MEASURES, Measure, Workload, ablation_row, ablation_table, refused_row
from loadtest.wan_bench.arms import Arm, Length, ModeChoice
from loadtest.wan_bench.turns import Sample

Make = Callable[..., Sample]
RING = Measure("ring", "--route nested")
ARM = Arm(ModeChoice("sweep"), Length(8))


def test_pairs_of_the_same_request(sample: Make) -> None:
    pairs = [(sample(100.0 + 10 * i), sample(150.0 + 10 * i)) for i in range(4)]
    row = ablation_row("wan", RING, ARM, [*pairs, (sample(1.0), sample(error="lost"))])
    assert (row["requests"], row["failures"], row["error"]) == (5, 1, "lost")
    assert (row["base_p50_ms"], row["p50_ms"], row["difference_ms"]) == (115.0, 165.0, 50.0)
    assert row["difference_quartiles_ms"] == [50.0, 50.0]
    assert row["net_difference_ms"] == pytest.approx(50.0)
    assert row["ratio"] == pytest.approx((160 / 110 + 170 / 120) / 2)
    assert row["same_text"] is True


def test_arithmetic_that_took_longer_is_no_difference_of_the_network(sample: Make) -> None:
    row = ablation_row("wan", RING, ARM, [(sample(100.0), sample(130.0, compute_ms=38.0))])
    assert (row["difference_ms"], row["net_difference_ms"]) == (30.0, pytest.approx(0.0))


def test_another_text_is_told_of(sample: Make) -> None:
    assert ablation_row("wan", RING, ARM, [(sample(), sample(output_hex="ff"))])["same_text"] is False


def test_a_refused_change_is_a_row_that_says_why(sample: Make) -> None:
    good, refused = (
        ablation_row("wan", RING, ARM, [(sample(), sample())]),
        refused_row("wan", RING, ARM, "no such flag"),
    )
    assert refused.keys() == good.keys()
    table = ablation_table([good, refused])
    assert table.count("refused") == 1
    assert "--route nested, sweep: no such flag" in table


def test_nothing_is_among_the_changes_and_each_change_has_a_flag() -> None:
    assert MEASURES[0].host_options == MEASURES[0].router_options == ()
    assert all(measure.host_options or measure.router_options for measure in MEASURES[1:])
    assert len({measure.change for measure in MEASURES}) == len(MEASURES)


def test_a_workload_spares_trips_for_each_byte() -> None:
    choices = (ModeChoice("sweep"), ModeChoice("ar", "int8"), ModeChoice("local"))
    work = Workload(choices, (Length(32), Length(256)), 5, 0)
    assert [(arm.choice.label, arm.length.count) for arm in work.arms()] == [("sweep", 256), ("ar:int8", 32)]
    assert [arm.choice.label for arm in work.arms(idle_s=5.0)] == ["sweep", "sweep:fp32", "ar:int8"]
