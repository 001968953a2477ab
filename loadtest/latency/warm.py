"""First requests compared with later ones: after the start, after a pause, after a host came back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.lab.lab import lab_problem
from loadtest.lab.profile import Profile
from loadtest.latency.interleave import Sample, ask_once
from loadtest.latency.rows import row_of
from loadtest.latency.settings import room_for_output
from loadtest.report.table import aligned
from loadtest.workload.arms import Arm, Length, ModeChoice
from loadtest.workload.prompts import NOVEL
from loadtest.workload.testbed import Testbed, default_hosts, deployed, open_network
from stages.errors import InputError, OnesweepError

SITUATIONS = ("steady", "after start", "after idle", "after reconnect")
STEADY = 3  # requests between the others, which are the measure for them


@dataclass(frozen=True)
class WarmSettings:
    """Settings of `onesweep bench warm`."""

    profile: Profile
    choices: tuple[ModeChoice, ...]
    checkpoint: Path
    max_bytes: int = 128
    rounds: int = 5  # deployments started; each has every situation once for each mode
    idle_s: float = 5.0
    keep_warm: bool = True

    @property
    def hosts(self) -> int:
        return default_hosts(self.checkpoint)


def check_warm(settings: WarmSettings) -> None:
    """Raises OnesweepError for what cannot be measured."""
    if settings.rounds < 1:
        raise InputError(f"--rounds must be at least 1, not {settings.rounds}")
    if not 0 <= settings.idle_s <= 3600:
        raise InputError(f"--idle-s must be 0 to 3600 seconds, not {settings.idle_s:g}")
    room = room_for_output(settings.checkpoint, settings.choices, (NOVEL,))
    if not 1 <= settings.max_bytes <= room:
        raise InputError(f"--bytes must be 1 to {room}, what the context leaves after the prompt")
    settings.profile.check_hosts(settings.hosts)
    if problem := lab_problem():
        raise OnesweepError(problem)


def measure_warm(settings: WarmSettings) -> list[dict[str, Any]]:
    """A row for each mode and situation."""
    samples: dict[tuple[ModeChoice, str], list[Sample]] = {}
    options = () if settings.keep_warm else ("--keep-warm-ms", "0")
    with open_network(settings.profile, settings.hosts) as network:
        for turn in range(settings.rounds):
            for choice in settings.choices:
                arm = Arm(choice, Length(settings.max_bytes))
                with deployed(network, settings.checkpoint, host_options=options, router_options=options) as testbed:
                    for situation, sample in _story(testbed, arm, turn, settings.idle_s):
                        samples.setdefault((choice, situation), []).append(sample)
    return [
        {"situation": situation, **row_of(settings.profile.name, Arm(choice, Length(settings.max_bytes)), taken)}
        for choice in settings.choices
        for situation in SITUATIONS
        if (taken := samples.get((choice, situation)))
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


def warm_table(rows: list[dict[str, Any]]) -> str:
    """For a terminal."""
    header = ("mode", "situation", "requests", "p50 ms", "worst ms", "floor ms", "x floor", "failed")
    cells = [
        (
            *(row["mode"], row["situation"], str(row["requests"])),
            *("-" if row[key] is None else f"{row[key]:,.1f}" for key in ("p50_ms", "p95_ms", "floor_ms")),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            str(row["failures"]),
        )
        for row in rows
    ]
    return aligned(header, cells)
