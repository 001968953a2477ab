"""Forecasts: from the links' round trips at once, and better with every request."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.modes.frontier import HANDLING_MS, UNIT_MS, LatencyModel, Option, TripOverhead
from serving.router.accounting import Account

RESAMPLE = Option("resample", (("chunk", 32),), 2.0, 256, 8, 8, 160.0, 80.0, 400_000)
AR = Option("ar", (), 2.0, 256, 256, 256, 256.0, 0.0, 80_000)
LOCAL = Option("local", (), 2.5, 256, 0, 0, 0.0, 120.0, 0)


def test_before_any_request_the_links_tell() -> None:
    conditions = LatencyModel(lambda: [60.0, 60.0, 60.0])
    assert conditions.trip_ms() == pytest.approx(4 * 30 + HANDLING_MS)
    assert conditions.step_ms() == pytest.approx(3 * 30 + HANDLING_MS)
    f = conditions.forecast(RESAMPLE, 256)
    assert f.ms == pytest.approx(8 * (120 + HANDLING_MS + UNIT_MS / 2) + 240)
    assert (f.high_ms, f.sweeps, f.compute_ms) == (f.ms, 8, 240.0)
    assert conditions.forecast(LOCAL, 128).ms == pytest.approx(60.0)
    assert conditions.forecast(AR, 256).ms == pytest.approx(124 + 255 * 94 + 256, rel=0.01)


@pytest.mark.parametrize("mode", ["resample", "ar"])
def test_what_the_links_do_not_tell_is_learned(mode: str) -> None:
    option = RESAMPLE if mode == "resample" else AR
    sweeps = int(option.sweeps)
    conditions = LatencyModel(lambda: [60.0, 60.0, 60.0])
    truth_ms = 40.0 * sweeps + conditions.forecast(option, 256).ms  # 40 ms more for each than anybody knew
    done = Account(sweeps=sweeps, output_bytes=256, output_tokens=256, wire_bytes_total=int(option.wire_bytes))
    done.local_compute_ms, done.compute_ms = option.router_ms, {"host-1": option.host_ms}
    for _ in range(12):
        conditions.record(mode, done, truth_ms)
    assert conditions.forecast(option, 256).ms == pytest.approx(truth_ms, rel=0.03)


def test_fixed_and_payload_are_told_apart() -> None:
    extra, numbers = TripOverhead(), random.Random(1)
    for _ in range(200):
        payload = numbers.choice([1_000, 50_000, 400_000])
        extra.record(10 + 25 * payload / 100_000 + numbers.gauss(0, 0.5), payload)
    assert extra.ms(0) == pytest.approx(10, abs=3)
    assert extra.ms(800_000) == pytest.approx(210, rel=0.1)


@given(st.lists(st.tuples(st.floats(-50, 5000), st.floats(0, 1e7)), max_size=30), st.floats(0, 1e7))
def test_more_payload_never_takes_less(seen: list[tuple[float, float]], payload: float) -> None:
    extra = TripOverhead()
    for ms, size in seen:
        extra.record(ms, size)
    assert extra.ms(payload + 1e5) >= extra.ms(payload)


@given(st.integers(1, 500), st.floats(1, 64), st.floats(1, 3))
def test_forecasts_grow_with_the_text(count: int, sweeps: float, over: float) -> None:
    option = Option("ar-speculative", (), 2.0, 64, sweeps, sweeps * over, 50.0, 20.0, 5_000)
    conditions = LatencyModel(lambda: [60.0, 60.0])
    shorter, longer = (conditions.forecast(option, n) for n in (count, count + 1))
    assert shorter.ms <= longer.ms
    assert shorter.ms <= shorter.high_ms
