"""Seconds and shares of a plan, against sums made by hand."""

from __future__ import annotations

import pytest

from stages.errors import ConfigError
from trainer.planning.link import Link
from trainer.planning.timing import timing_of
from trainer.planning.traffic import Traffic, wire_bytes
from trainer.rounds.settings import RoundSettings

MB = 1_000_000
NEAR, FAR = Link(20, 100, 0), Link(20, 100, 30)


def settings(**changes: object) -> RoundSettings:
    return RoundSettings(rounds=10, **changes)  # type: ignore[arg-type]


def traffic(pieces: int = 1, copies: tuple[int, ...] = ()) -> Traffic:
    """Of a megabyte a round both ways."""
    each = (MB // pieces,) * pieces
    return Traffic(MB, each, each, copies, 10, 9, 9)


def test_without_delay_a_file_takes_its_bits() -> None:
    assert NEAR.up_s(MB) == pytest.approx(wire_bytes(MB) * 8 / 20e6)
    assert NEAR.down_s(MB) == pytest.approx(wire_bytes(MB) * 8 / 100e6)


def test_slow_start_waits_for_four_answers() -> None:
    """At 20 Mbit/s and 60 ms, windows of 14.5, 29, 58 and 116 kB do not fill the link; the next one does."""
    windows = [14480 * 2**i * 8 / 20e6 for i in range(4)]
    gaps = sum(0.06 - window for window in windows)
    assert FAR.up_s(MB) == pytest.approx(wire_bytes(MB) * 8 / 20e6 + gaps)
    assert FAR.up_s(10_000) == pytest.approx(wire_bytes(10_000) * 8 / 20e6), "one window holds it"


def test_a_round_that_waits_is_training_and_talking() -> None:
    timing = timing_of(traffic(copies=(500_000,)), settings(steps_per_round=30), FAR, 0.5)
    talking = FAR.up_s(MB) + FAR.down_s(MB) + FAR.down_s(500_000) + 5 * 0.06
    assert timing.round_s == pytest.approx(15 + talking)
    assert timing.used == pytest.approx(15 / (15 + talking))
    assert timing.seconds == pytest.approx(10 * timing.round_s + FAR.down_s(MB) + 3 * 0.06)


def test_with_overlap_only_what_is_fetched_is_lost() -> None:
    timing = timing_of(traffic(), settings(steps_per_round=30, overlap="eager"), FAR, 0.5)
    assert timing.round_s == pytest.approx(15 + FAR.down_s(MB) + 2 * 0.06)


def test_an_update_longer_than_a_round_is_what_a_round_takes() -> None:
    timing = timing_of(traffic(), settings(steps_per_round=1, overlap="eager"), FAR, 0.001)
    assert timing.round_s == pytest.approx(FAR.up_s(MB) + 2 * 0.06)


def test_fragments_ask_more_often() -> None:
    whole = timing_of(traffic(), settings(), NEAR, 0.5)
    pieces = timing_of(traffic(4), settings(fragments=4), NEAR, 0.5)
    assert pieces.round_s == pytest.approx(whole.round_s, rel=1e-3)
    far, farther = (timing_of(traffic(n), settings(fragments=n), FAR, 0.5).round_s for n in (1, 4))
    assert farther > far + 3 * 4 * 0.06


@pytest.mark.parametrize("changed", [{"up_mbps": 0}, {"down_mbps": float("inf")}, {"latency_ms": -1}])
def test_a_link_that_there_is_not_is_told(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        Link(**{"up_mbps": 20, "down_mbps": 100, "latency_ms": 30, **changed})
