"""Round trips and rates of a lab, measured with plain sockets; loss, order and queues are those of `Channel`."""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.lab.lab import Lab, temporary_lab
from loadtest.lab.profile import MTU, SHIPPED, Link, Profile, read_profiles

PORT = 5000
PLAIN_SOCKETS = Path(__file__).with_name("plain_sockets.py")
ATTEMPTS = 30  # so many only where a machine is busy for a quarter of a minute


def started(lab: Lab, node: str, *arguments: object) -> subprocess.Popen[str]:
    """`plain_sockets.py` in a node; it ends with the lab at the latest."""
    argv = [sys.executable, "-I", str(PLAIN_SOCKETS), *map(str, arguments)]
    return subprocess.Popen(lab.command(node, argv), stdout=subprocess.PIPE, text=True)


def listening(lab: Lab, node: str, *arguments: object) -> subprocess.Popen[str]:
    process = started(lab, node, *arguments)
    assert process.stdout.readline() == "ready\n"
    return process


def result(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(output)


def settles(measure: Callable[[], float], bounds: tuple[float, float]) -> None:
    """Check that some measurement lies between. Others use this machine, too, so one that was
    disturbed is made again; the bounds stay."""
    seen: list[float] = []
    for _ in range(ATTEMPTS):
        seen.append(measure())
        if bounds[0] <= seen[-1] <= bounds[1]:
            return
        time.sleep(0.5)
    raise AssertionError(f"none of {seen} lies in {bounds}")


def round_trips(lab: Lab, node: str) -> list[float]:
    with listening(lab, node, "echo", PORT) as echo:
        try:
            return result(started(lab, "router", "ping", lab.address(node), PORT, 20))
        finally:
            echo.kill()


@pytest.mark.parametrize("name", sorted(set(read_profiles(SHIPPED)) - {"nat"}))  # its machines cannot be reached
def test_a_round_trip_takes_the_time_of_its_profile(needs_lab: None, name: str) -> None:
    profile = read_profiles()[name]
    with temporary_lab(profile, 3) as lab:
        for node in ("host-1", "host-3"):
            there, back = profile.link("router", node), profile.link(node, "router")
            due_ms, jitter_ms = there.delay_ms + back.delay_ms, there.jitter_ms + back.jitter_ms
            trips: list[float] = []

            def median(node: str = node, trips: list[float] = trips) -> float:
                trips += round_trips(lab, node)
                return statistics.median(trips[-20:])

            # A median of twenty jittered trips wanders by about its standard error.
            wander_ms = 3 * 1.25 * jitter_ms / math.sqrt(6 * 15)
            settles(median, (due_ms - wander_ms, due_ms + max(1.0, 0.02 * due_ms) + wander_ms))
            # A packet that is nearly due goes at once, twice a trip.
            early_ms = 0.04
            assert min(trips) >= due_ms - jitter_ms - early_ms


@pytest.mark.parametrize("rate_mbps", [5.0, 40.0, 100.0])
def test_a_link_carries_its_rate(needs_lab: None, rate_mbps: float) -> None:
    count = round(rate_mbps * 125_000 * 0.5 / MTU)
    link = Link(delay_ms=2, rate_mbps=rate_mbps, queue_ms=1000)
    with temporary_lab(Profile("test", link), 1) as lab:

        def measured_mbps() -> float:
            collector = listening(lab, "host-1", "collect", PORT, count)
            result(started(lab, "router", "send", lab.address("host-1"), PORT, count))
            arrivals = result(collector)
            return (count - 1) * MTU * 8 / (arrivals[-1] - arrivals[0])

        settles(measured_mbps, (0.9 * rate_mbps, 1.1 * rate_mbps))
