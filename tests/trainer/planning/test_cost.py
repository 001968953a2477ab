"""Seconds and shares of a plan, against sums made by hand."""

import pytest

from stages.errors import ConfigError
from trainer.blocks.config import RoundSettings
from trainer.planning.cost import (
    PartInventory,
    WorkerLink,
    WorkerTraffic,
    coordinator_memory,
    timing_of,
    traffic_of,
    worker_memory,
)

MB = 1_000_000
NEAR, FAR = WorkerLink(20, 100, 0), WorkerLink(20, 100, 30)


def settings(**changes: object) -> RoundSettings:
    return RoundSettings(rounds=10, **changes)  # type: ignore[arg-type]


def traffic(pieces: int = 1, copies: tuple[int, ...] = ()) -> WorkerTraffic:
    """Of a megabyte a round both ways."""
    each = (MB // pieces,) * pieces
    return WorkerTraffic(MB, each, each, copies, 10, 9, 9)


def test_slow_start_waits_for_four_answers() -> None:
    """At 20 Mbit/s and 60 ms, windows of 14.5, 29, 58 and 116 kB do not fill the link; the next one does."""
    windows = [14480 * 2**i * 8 / 20e6 for i in range(4)]
    gaps = sum(0.06 - window for window in windows)
    assert FAR.up_s(MB) == pytest.approx(MB * 1500 / 1448 * 8 / 20e6 + gaps)
    assert FAR.up_s(10_000) == pytest.approx(10_000 * 1500 / 1448 * 8 / 20e6), "one window holds it"


def test_a_round_that_waits_is_training_and_talking() -> None:
    timing = timing_of(traffic(copies=(500_000,)), settings(steps_per_round=30), FAR, 0.5)
    talking = FAR.up_s(MB) + FAR.down_s(MB) + FAR.down_s(500_000) + 5 * 0.06
    assert timing.round_s == pytest.approx(15 + talking)
    assert timing.used == pytest.approx(15 / (15 + talking))
    assert timing.seconds == pytest.approx(10 * timing.round_s + FAR.down_s(MB) + 3 * 0.06)


def test_with_overlap_only_what_is_fetched_is_lost() -> None:
    timing = timing_of(traffic(), settings(steps_per_round=30, overlap="eager"), FAR, 0.5)
    assert timing.round_s == pytest.approx(15 + FAR.down_s(MB) + 2 * 0.06)


@pytest.mark.parametrize("changed", [{"up_mbps": 0}, {"down_mbps": float("inf")}, {"latency_ms": -1}])
def test_a_link_that_there_is_not_is_told(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        WorkerLink(**{"up_mbps": 20, "down_mbps": 100, "latency_ms": 30, **changed})


# Memory of a plan, against sums made by hand.


P = 4 * 1000
PART = PartInventory("block-0", {"a": (10, 100)}, P + 500, {"block-1": {"b": (200,)}}, 3)


def worker(**changes: object) -> int:
    settings = RoundSettings(**{"rounds": 2, "codec": "fp32", "down_codec": "fp32", **changes})  # type: ignore[arg-type]
    return worker_memory(PART, traffic_of(PART, settings), settings)


# Weights, optimizer, copies (as fetched, and in the module that reads), and the version that the round began with.
STAYS = P + (P + 500) + 2 * 800 + P
INT8 = 10 * 4 + 1000  # of an update in int8, which error feedback decodes


def test_a_worker_of_whole_numbers_that_waits() -> None:
    assert worker() == STAYS + 4 * P, "update, weights, and the payload twice"


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"codec": "int8"}, P + INT8),
        ({"overlap": "eager"}, 3 * P),
        ({"overlap": "eager", "codec": "int8"}, 4 * P + INT8),
    ],
)
def test_what_stays_between_rounds(changes: dict[str, str], more: int) -> None:
    """Error feedback; the last update; eager's own base and momentum."""
    assert worker(**changes) - worker() == more


def test_a_coordinator_by_hand() -> None:
    settings = RoundSettings(rounds=2, replicas=3, outer="nesterov", codec="fp32", down_codec="fp32")
    traffic = [traffic_of(PART, settings)] * 2
    # weights and momentum, two whole files, of both parts; three updates, their payload, and a merge's own tensors
    assert coordinator_memory([PART] * 2, traffic, settings) == 2 * (2 * P + 2 * P) + (3 + 1 + 3) * P
    lossy = RoundSettings(rounds=2, replicas=3, outer="nesterov", codec="fp32", down_codec="int8")
    traffic = [traffic_of(PART, lossy)] * 2
    differences = 2 * 4 * (1000 + 40)
    assert coordinator_memory([PART] * 2, traffic, lossy) == 2 * 5 * P + differences + 7 * P
