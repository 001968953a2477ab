"""Rows: their keys, their medians, and failures that stay in sight."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loadtest.latency.run import RequestSeries, Sample, row_of, same_as_ar, take_turns
from loadtest.workload.caller import Access
from loadtest.workload.prompts import Length
from loadtest.workload.testbed import Network, Testbed
from serving.client.variants import ModeVariant
from tests.loadtest.latency.conftest import account

KEYS = {
    *("profile", "mode", "length", "unit", "requests", "p50_ms", "p95_ms", "first_byte_ms", "floor_ms", "sweeps"),
    *("hops", "wire_bytes", "host_seconds", "failures", "ratio", "acceptance"),
}
SWEEP = RequestSeries(ModeVariant("sweep"), Length(8))
Make = Callable[..., Sample]

# 3 x 10 ms of delay, 40,000 bits at 1 Mbit/s, 8 ms of compute
FLOOR_MS = 30 + 40 + 8


def test_a_row_has_medians_of_successful_requests(sample: Make) -> None:
    row = row_of("wan", SWEEP, [*(sample(100.0 + i) for i in range(4)), sample(error="host-2 is lost")])
    assert row.keys() >= KEYS
    assert (row["requests"], row["failures"], row["error"]) == (5, 1, "host-2 is lost")
    assert (row["p50_ms"], row["p95_ms"]) == (101.5, 103.0)
    assert row["floor_ms"] == pytest.approx(FLOOR_MS)
    assert row["ratio"] == pytest.approx(101.5 / FLOOR_MS)
    assert (row["sweeps"], row["hops"], row["wire_bytes"], row["largest_hop_bytes"]) == (1, 3, 5000, 2500)
    assert row["host_seconds"] == pytest.approx(0.008)
    assert row["acceptance"] is None


def test_acceptance_is_the_share_of_reached_draft_tokens(sample: Make) -> None:
    row = row_of("wan", SWEEP, [sample(reached=10, accepted=9), sample(reached=30, accepted=11)])
    assert row["acceptance"] == 0.5
    assert row_of("wan", SWEEP, [sample(reached=0, accepted=0)])["acceptance"] is None


@pytest.fixture
def taken(sample: Make) -> Callable[..., list[Sample]]:
    """Samples with these texts, numbered; None failed."""

    def make(*texts: bytes | None) -> list[Sample]:
        made = [sample(error="lost") if text is None else sample(output_hex=text.hex()) for text in texts]
        return [replace(each, number=number) for number, each in enumerate(made)]

    return make


def series(mode: str, **settings: Any) -> RequestSeries:
    return RequestSeries(ModeVariant(mode).having(**settings), Length(8))


def test_texts_of_speculation_are_compared_with_ar(taken: Callable[..., list[Sample]]) -> None:
    found = {series("ar"): taken(b"aa", b"cc", b"dd"), series("ar-speculative"): taken(b"aa", None, b"cc")}
    assert same_as_ar(series("ar-speculative"), found) == {"same_as_ar": 1, "compared": 2}
    assert same_as_ar(series("ar"), found) == {}
    assert same_as_ar(series("ar-speculative"), found | {series("ar-speculative"): taken(None)}) == {}


def test_texts_are_compared_within_one_codec(taken: Callable[..., list[Sample]]) -> None:
    guessing = series("ar-speculative", codec="int8")
    plain = {series("ar"): taken(b"aa"), series("ar", codec="int8"): taken(b"cc")}
    assert same_as_ar(guessing, plain | {guessing: taken(b"cc")}) == {"same_as_ar": 1, "compared": 1}


# Turns rotate, after a warm-up: with a deployment that is not there.
class Pretence:
    """A caller that answers every request."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def ask(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.calls += calls
        return [{"latency_ms": 90.0, "first_byte_ms": 80.0, "account": account()} for _ in calls]


def test_turns_rotate_after_a_warm_up_and_share_their_seeds() -> None:
    pretence = Pretence()
    testbed = Testbed(Access("127.0.0.1:1"), Network("wan", 2, 7700), pretence)  # type: ignore[arg-type]
    every = [(testbed, RequestSeries(ModeVariant(mode), Length(8))) for mode in ("sweep", "chunked", "ar")]
    taken = [series.variant.mode for _, series, _ in take_turns(every, 2, at_once=1, seed=5)]
    assert taken == ["sweep", "chunked", "ar", "chunked", "ar", "sweep"]
    asked = [(call["mode"], call["seed"]) for call in pretence.calls]
    assert asked[:3] == [("sweep", 5), ("chunked", 5), ("ar", 5)]
    assert asked[3:] == list(zip(taken, [5, 5, 5, 6, 6, 6], strict=True))
