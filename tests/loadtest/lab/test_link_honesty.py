"""Round trips and rates of a lab, measured with plain sockets; loss, order and queues are those of `Channel`."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.lab.lab import Lab
from loadtest.lab.profile import MTU, SHIPPED, Link, read_profiles
from tests.loadtest.lab.conftest import settles

PORT = 5000


def round_trips(programs: Any, lab: Lab, node: str) -> list[float]:
    echo = programs.start(lab, node, "echo", PORT, ready=True)
    try:
        return list(programs.run(lab, "router", "ping", lab.address(node), PORT, 20))
    finally:
        echo.kill()
        echo.wait()


@pytest.mark.parametrize("name", sorted(set(read_profiles(SHIPPED)) - {"nat"}))  # whose machines nobody can reach
def test_a_round_trip_takes_the_time_of_its_profile(lab_of: Callable[..., Lab], programs: Any, name: str) -> None:
    profile = read_profiles()[name]
    lab = lab_of(profile, 3)
    for node in ("host-1", "host-3"):
        there, back = profile.link("router", node), profile.link(node, "router")
        due_ms, jitter_ms = there.delay_ms + back.delay_ms, there.jitter_ms + back.jitter_ms
        trips: list[float] = []

        def median(node: str = node, trips: list[float] = trips) -> float:
            trips += round_trips(programs, lab, node)
            return statistics.median(trips[-20:])

        # A median of twenty jittered trips wanders by about its standard error.
        wander_ms = 3 * 1.25 * jitter_ms / math.sqrt(6 * 15)
        settles(median, (due_ms - wander_ms, due_ms + max(1.0, 0.02 * due_ms) + wander_ms))
        # A packet that is nearly due goes at once, twice a trip.
        early_ms = 0.04
        assert min(trips) >= due_ms - jitter_ms - early_ms


@pytest.mark.parametrize("rate_mbps", [5.0, 40.0, 100.0])
def test_a_link_carries_its_rate(lab_of: Callable[..., Lab], programs: Any, rate_mbps: float) -> None:
    count = round(rate_mbps * 125_000 * 0.5 / MTU)
    lab = lab_of(Link(delay_ms=2, rate_mbps=rate_mbps, queue_ms=1000))

    def measured_mbps() -> float:
        collector = programs.start(lab, "host-1", "collect", PORT, count, ready=True)
        programs.run(lab, "router", "send", lab.address("host-1"), PORT, count)
        arrivals = programs.result(collector)
        return (count - 1) * MTU * 8 / (arrivals[-1] - arrivals[0])

    settles(measured_mbps, (0.9 * rate_mbps, 1.1 * rate_mbps))
