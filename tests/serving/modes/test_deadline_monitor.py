"""When another option has to take over, from forecasts made by hand."""

from __future__ import annotations

import pytest

from serving.modes.auto import DeadlineMonitor
from serving.modes.frontier import Option
from serving.modes.latency_model import LatencyModel

CONDITIONS = LatencyModel(lambda: [0.0])
LOCAL = Option("local", (), 3.0, 100, 0, 0, 0.0, 200.0, 0.0)
SLOW = Option("chunked", (("chunk", 10),), 2.0, 100, 10, 10, 1000.0, 0.0, 0.0)  # about 100 ms a sweep
QUICK = Option("sweep", (), 2.0, 100, 1, 1, 100.0, 0.0, 0.0)


def watch(option: Option = SLOW) -> DeadlineMonitor:
    return DeadlineMonitor(CONDITIONS, option, LOCAL, 100, clock=lambda: 0.0)


def test_while_there_is_time_for_a_sweep_and_the_other_way_after_it() -> None:
    assert watch().spare_ms(1500.0) == pytest.approx(1300.0)
    assert watch().spare_ms(700.0) == pytest.approx(500.0)


def test_the_last_moment() -> None:
    assert watch().spare_ms(301.0) == 0.0
    assert watch().spare_ms(310.0) == pytest.approx(110.0)


def test_what_fits_is_not_given_up_for_what_would_not_fit_after_it() -> None:
    one = Option("sweep", (), 2.0, 100, 1, 1, 300.0, 0.0, 0.0)
    assert watch(one).spare_ms(450.0) is None
    assert watch(one).spare_ms(200.0) == 0.0


def test_nothing_is_quicker() -> None:
    assert watch(QUICK).spare_ms(50.0) is None


def test_a_text_that_goes_slower_than_expected() -> None:
    now_s, option = [0.0], Option("chunked", (("chunk", 10),), 2.0, 100, 10, 10, 0.0, 0.0, 0.0)
    seen = DeadlineMonitor(CONDITIONS, option, LOCAL, 100, clock=lambda: now_s[0])
    assert seen.spare_ms(100.0) is None  # 40 ms expected
    now_s[0] = 0.03
    seen.see(10)
    # 30 ms a piece so far: 270 ms to come, where the local model takes 180
    assert seen.spare_ms(190.0) == 0.0
