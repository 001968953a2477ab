"""Whether the first request is as fast as the others: after the start, after a pause, after a host came back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.table import aligned
from loadtest.wan.lab import lab_problem, temporary_lab
from loadtest.wan.profile import Profile
from loadtest.wan_bench.arms import Arm, Length, ModeChoice
from loadtest.wan_bench.deployment import deployed
from loadtest.wan_bench.floor import Course
from loadtest.wan_bench.prompts import NOVEL
from loadtest.wan_bench.rows import row_of
from loadtest.wan_bench.settings import DEFAULT_HOSTS, room_for_output
from loadtest.wan_bench.station import Station, open_station
from loadtest.wan_bench.turns import Sample, sample_of
from stages.errors import InputError, OnesweepError
from stages.parts import plan_host

SITUATIONS = ("steady", "after start", "after idle", "after reconnect")
STEADY = 3
"""Requests between the others, which are the measure for them."""


@dataclass(frozen=True)
class WarmSettings:
    """What `onesweep bench warm` is told."""

    profile: Profile
    choices: tuple[ModeChoice, ...]
    checkpoint: Path
    max_bytes: int = 128
    rounds: int = 5
    """Deployments started; each has every situation once for each mode."""
    idle_s: float = 5.0
    keep_warm: bool = True

    @property
    def hosts(self) -> int:
        """Three, or one for each block where there are fewer."""
        return min(DEFAULT_HOSTS, plan_host(self.checkpoint, (0,)).parts)


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
    course = Course(tuple(f"host-{i + 1}" for i in range(settings.hosts)), settings.profile.link)
    with temporary_lab(settings.profile, settings.hosts) as lab:
        for turn in range(settings.rounds):
            for choice in settings.choices:
                with contextlib.ExitStack() as stack:
                    deployment = stack.enter_context(deployed(lab, settings.checkpoint, options, options))
                    place = lab.command
                    station = stack.enter_context(open_station(settings.profile.name, deployment, course, place))
                    for situation, sample in _story(station, Arm(choice, Length(settings.max_bytes)), turn, settings):
                        samples.setdefault((choice, situation), []).append(sample)
    return [
        {"situation": situation, **row_of(settings.profile.name, Arm(choice, Length(settings.max_bytes)), taken)}
        for choice in settings.choices
        for situation in SITUATIONS
        if (taken := samples.get((choice, situation)))
    ]


def _story(station: Station, arm: Arm, seed: int, settings: WarmSettings) -> Iterator[tuple[str, Sample]]:
    def ask() -> Sample:
        (answer,) = station.caller.ask([arm.call(0, seed)])
        return sample_of(station, 0, seed, answer)

    yield "after start", ask()
    for _ in range(STEADY):
        yield "steady", ask()
    time.sleep(settings.idle_s)
    yield "after idle", ask()
    station.deployment.kill(station.course.hosts[-1])
    happened = station.mend()
    sample = ask()
    yield "after reconnect", sample if not sample.error else Sample(seed, 0, error=f"{happened}: {sample.error}")


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
