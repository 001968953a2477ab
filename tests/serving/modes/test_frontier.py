"""The frontier file: its content, errors in it, and the sweeps that follow from it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.modes.frontier import HANDLING_MS, UNIT_MS, Frontier, LatencyModel, Option, TripOverhead, read_frontier
from serving.router.accounting import Account
from stages.errors import InputError

COSTS = {"output_tokens": 256, "host_ms": 90.0, "router_ms": 30.0, "wire_bytes": 9000.0}


def option(mode: str, bits: float = 2.0, sweeps: float = 8.0, high: float = 8.0, **settings: Any) -> Option:
    return Option(mode, tuple(settings.items()), bits, sweeps=sweeps, sweeps_high=high, **COSTS)


def record(**changes: Any) -> dict[str, Any]:
    frontier = Frontier(
        (option("local", 2.5, 0, 0), option("resample", scorer="ar", chunk=32, temperature=0.8)),
        {"ar": "a" * 64, "local": "b" * 64},
        "judge",
        1.5,
    )
    return {**frontier.to_record(), **changes}


def changed(**changes: Any) -> dict[str, Any]:
    return record(options=[{**record()["options"][0], **changes}])


def test_a_written_frontier_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(record()))
    frontier = read_frontier(path)
    assert json.loads(json.dumps(frontier.to_record())) == json.loads(path.read_text())
    assert frontier.options[1].label == "resample:ar:chunk=32:temperature=0.8"
    assert frontier.human_bits == 1.5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object, not list"),
        ({"frontier": 2}, "'frontier' must be 1"),
        (record(options=[]), "'options' must be a list"),
        (record(options=None), "'options' must be a list"),
        (record(options=[3]), "an option must be a JSON object, not int"),
        (record(weights=None), "weights must be a JSON object"),
        (record(judge=3), "it: judge must be a string, not 3"),
        (changed(mode="magic"), "unknown mode 'magic'"),
        (None, "it cannot be read: No such file"),
        (changed(mode=["local"]), "unknown mode"),
        (changed(bits="good"), "bits must be a finite number of at"),
        (changed(sweeps=-1), "of at least 0, not -1"),
        (changed(settings={"magic": 1}), "local: magic is not a setting; choose from scorer, chunk,"),
        (changed(settings={"chunk": "x"}), "chunk must be a whole number, not 'x'"),
        (changed(settings={"steps": 2}), "mode local does not take steps: leave it out, or use mode sweep, chunked"),
        (changed(mode="ar", settings={"codec": "int4"}), "mode ar has no codec 'int4' (did you mean int8?)"),
        *((changed(**{key: None}), f"local: {key} is missing") for key in ("bits", "sweeps", "sweeps_high", *COSTS)),
        (changed(mode="resample", settings={"scorer": "a"}), "mode resample has no scorer 'a' (did you mean ar?)"),
    ],
)
def test_an_invalid_file_is_explained(tmp_path: Path, content: object, says: str) -> None:
    path = tmp_path / "f.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match="onesweep bench quality") as error:
        read_frontier(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("made", "count", "sweeps"),
    [
        (option("local"), 100, (0, 0)),
        (option("sweep"), 100, (1, 1)),
        (option("ar"), 100, (100, 100)),
        (option("chunked", chunk=32), 100, (4, 4)),
        (option("resample", chunk=48), 96, (2, 2)),
        (option("resample", candidates=16), 256, (1, 1)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 256, (32.0, 40.0)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 512, (64.0, 80.0)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 64, (8.0, 12.0)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 1, (1, 1)),
        (option("ar-speculative", sweeps=200.0, high=300.0), 256, (200.0, 256)),
    ],
)
def test_sweeps_follow_from_mode_and_length(made: Option, count: int, sweeps: tuple[float, float]) -> None:
    assert made.sweeps_for(count) == pytest.approx(sweeps)


# Forecasts: from the links' round trips at once, and better with every request.
RESAMPLE = Option("resample", (("chunk", 32),), 2.0, 256, 8, 8, 160.0, 80.0, 400_000)
AR = Option("ar", (), 2.0, 256, 256, 256, 256.0, 0.0, 80_000)
LOCAL = Option("local", (), 2.5, 256, 0, 0, 0.0, 120.0, 0)


def test_first_forecasts_use_the_round_trips_of_the_links() -> None:
    conditions = LatencyModel(lambda: [60.0, 60.0, 60.0])
    assert conditions.trip_ms() == pytest.approx(4 * 30 + HANDLING_MS)
    assert conditions.step_ms() == pytest.approx(3 * 30 + HANDLING_MS)
    f = conditions.forecast(RESAMPLE, 256)
    assert f.ms == pytest.approx(8 * (120 + HANDLING_MS + UNIT_MS / 2) + 240)
    assert (f.high_ms, f.sweeps, f.compute_ms) == (f.ms, 8, 240.0)
    assert conditions.forecast(LOCAL, 128).ms == pytest.approx(60.0)
    assert conditions.forecast(AR, 256).ms == pytest.approx(124 + 255 * 94 + 256, rel=0.01)


@pytest.mark.parametrize("mode", ["resample", "ar"])
def test_forecasts_adapt_to_measured_requests(mode: str) -> None:
    option = RESAMPLE if mode == "resample" else AR
    sweeps = int(option.sweeps)
    conditions = LatencyModel(lambda: [60.0, 60.0, 60.0])
    truth_ms = 40.0 * sweeps + conditions.forecast(option, 256).ms  # 40 ms more for each than anybody knew
    done = Account(sweeps=sweeps, output_bytes=256, output_tokens=256, wire_bytes_total=int(option.wire_bytes))
    done.local_compute_ms, done.compute_ms = option.router_ms, {"host-1": option.host_ms}
    for _ in range(12):
        conditions.record(mode, done, truth_ms)
    assert conditions.forecast(option, 256).ms == pytest.approx(truth_ms, rel=0.03)


def test_fixed_and_payload_overhead_are_separated() -> None:
    extra, numbers = TripOverhead(), random.Random(1)
    for _ in range(200):
        payload = numbers.choice([1_000, 50_000, 400_000])
        extra.record(10 + 25 * payload / 100_000 + numbers.gauss(0, 0.5), payload)
    assert extra.ms(0) == pytest.approx(10, abs=3)
    assert extra.ms(800_000) == pytest.approx(210, rel=0.1)


@given(st.lists(st.tuples(st.floats(-50, 5000), st.floats(0, 1e7)), max_size=30), st.floats(0, 1e7))
def test_a_larger_payload_never_takes_less_time(seen: list[tuple[float, float]], payload: float) -> None:
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
