"""Rows: their keys, their medians, and failures that stay in sight."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loadtest.latency.run import RequestSeries, Sample, row_of, same_as_ar
from loadtest.workload.prompts import Length
from serving.client.variants import ModeVariant

KEYS = {
    *("profile", "mode", "length", "unit", "requests", "p50_ms", "p95_ms", "first_byte_ms", "floor_ms", "sweeps"),
    *("hops", "wire_bytes", "host_seconds", "failures", "ratio", "acceptance"),
}
SWEEP = RequestSeries(ModeVariant("sweep"), Length(8))
Make = Callable[..., Sample]

# 3 x 10 ms of delay, 40,000 bits at 1 Mbit/s, 8 ms of compute
FLOOR_MS = 30 + 40 + 8


def test_medians_over_what_ended_well(sample: Make) -> None:
    row = row_of("wan", SWEEP, [*(sample(100.0 + i) for i in range(4)), sample(error="host-2 is lost")])
    assert row.keys() >= KEYS
    assert (row["requests"], row["failures"], row["error"]) == (5, 1, "host-2 is lost")
    assert (row["p50_ms"], row["p95_ms"]) == (101.5, 103.0)
    assert row["floor_ms"] == pytest.approx(FLOOR_MS)
    assert row["ratio"] == pytest.approx(101.5 / FLOOR_MS)
    assert (row["sweeps"], row["hops"], row["wire_bytes"], row["largest_hop_bytes"]) == (1, 3, 5000, 2500)
    assert row["host_seconds"] == pytest.approx(0.008)
    assert row["acceptance"] is None


def test_acceptance_is_a_share_of_all_guesses_that_were_reached(sample: Make) -> None:
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


def test_speculation_is_held_to_the_texts_of_ar(taken: Callable[..., list[Sample]]) -> None:
    found = {series("ar"): taken(b"aa", b"cc", b"dd"), series("ar-speculative"): taken(b"aa", None, b"cc")}
    assert same_as_ar(series("ar-speculative"), found) == {"same_as_ar": 1, "compared": 2}
    assert same_as_ar(series("ar"), found) == {}
    assert same_as_ar(series("ar-speculative"), found | {series("ar-speculative"): taken(None)}) == {}


def test_a_codec_is_compared_with_its_own(taken: Callable[..., list[Sample]]) -> None:
    guessing = series("ar-speculative", codec="int8")
    plain = {series("ar"): taken(b"aa"), series("ar", codec="int8"): taken(b"cc")}
    assert same_as_ar(guessing, plain | {guessing: taken(b"cc")}) == {"same_as_ar": 1, "compared": 1}
