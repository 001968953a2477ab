"""First requests compared with later ones: after the start, after a pause, after a host came back."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from loadtest.lab.profile import Profile
from loadtest.latency.interleave import Sample, ask_once
from loadtest.latency.rows import row_of
from loadtest.latency.settings import WarmSettings
from loadtest.report.table import Table, number_column, text_column
from loadtest.workload.arms import Arm, Length
from loadtest.workload.testbed import Testbed, default_hosts, deployed, open_network

SITUATIONS = ("steady", "after start", "after idle", "after reconnect")
STEADY = 3  # requests between the others, which are the measure for them

WARM: Table[dict[str, Any]] = Table(
    (
        *map(text_column, ("mode", "situation", "requests")),
        number_column("p50 ms", "p50_ms"),
        number_column("worst ms", "p95_ms"),
        number_column("floor ms", "floor_ms"),
        number_column("x floor", "ratio", 2),
        text_column("failed", "failures"),
    )
)


def measure_warm(settings: WarmSettings, profile: Profile) -> list[dict[str, Any]]:
    """A row for each mode and situation."""
    arms = [Arm(choice, Length(settings.max_bytes)) for choice in settings.choices]
    samples: dict[tuple[Arm, str], list[Sample]] = defaultdict(list)
    options = () if settings.keep_warm else ("--keep-warm-ms", "0")
    with open_network(profile, default_hosts(settings.checkpoint)) as network:
        for turn in range(settings.rounds):
            for arm in arms:
                # a deployment for each mode: a second one would find links that the first has warmed
                with deployed(network, settings.checkpoint, host_options=options, router_options=options) as testbed:
                    for situation, sample in _story(testbed, arm, turn, settings.idle_s):
                        samples[arm, situation].append(sample)
    return [
        {"situation": situation, **row_of(profile.name, arm, samples[arm, situation])}
        for arm in arms
        for situation in SITUATIONS
    ]


def _story(testbed: Testbed, arm: Arm, seed: int, idle_s: float) -> Iterator[tuple[str, Sample]]:
    assert testbed.deployment is not None
    yield "after start", ask_once(testbed, arm, 0, seed)
    for _ in range(STEADY):
        yield "steady", ask_once(testbed, arm, 0, seed)
    time.sleep(idle_s)
    yield "after idle", ask_once(testbed, arm, 0, seed)
    testbed.deployment.kill(testbed.network.nodes[-1])
    happened = testbed.mend()
    sample = ask_once(testbed, arm, 0, seed)
    yield "after reconnect", replace(sample, error=f"{happened}: {sample.error}") if sample.error else sample
