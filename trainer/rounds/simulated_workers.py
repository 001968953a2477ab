"""Speeds of workers; of virtual ones also their links and the fate of their updates."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from stages.errors import ConfigError

Fate = Literal["in time", "late", "lost"]
MAX_PACE_S = 3600.0


@dataclass(frozen=True)
class SimulatedWorkers:
    """Seconds are virtual, but for `pace_s`."""

    step_s: float = 1.0  # of one local step on a machine of speed 1
    # Times that a replica takes longer, replica by replica, from the front again when there are more.
    slowness: tuple[float, ...] = (1.0,)
    latency_s: float = 0.1
    up_mbps: float = 20.0
    down_mbps: float = 100.0
    in_time: float = 1.0  # share of the updates that come when they are made; the others are `late_rounds` late
    late_rounds: float = 1.5  # lengths of a round by which the late ones come later
    lost: float = 0.0  # share of the updates that never come
    pace_s: float = 0.0  # of real workers: what a local step takes at least on a machine of speed 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("step_s", "latency_s", "up_mbps", "down_mbps", "late_rounds"):
            if not is_above_zero(value := getattr(self, name)):
                raise ConfigError(f"{name} must be a finite number above 0, not {value!r}")
        if not self.slowness or not all(map(is_above_zero, self.slowness)):
            raise ConfigError(f"slowness must be numbers above 0, not {self.slowness!r}")
        if not is_number(self.pace_s) or not 0 <= self.pace_s <= MAX_PACE_S:
            raise ConfigError(f"pace_s must be a number from 0 to {MAX_PACE_S:g}, not {self.pace_s!r}")
        for name in ("in_time", "lost"):
            if not is_number(value := getattr(self, name)) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a share from 0 to 1, not {value!r}")
        if self.lost == 1:
            raise ConfigError("with lost = 1 no update ever comes")

    def training_s(self, replica: int, steps: int) -> float:
        return steps * self.step_s * self._slowness(replica)

    def rest_s(self, replica: int, took_s: float) -> float:
        """Pause of a real worker after a local step that took so long."""
        return max(self._slowness(replica) * max(took_s, self.pace_s) - took_s, 0.0)

    def up_s(self, size: int) -> float:
        """A message of `size` bytes on its way to the coordinator."""
        return self.latency_s + size * 8e-6 / self.up_mbps

    def down_s(self, size: int) -> float:
        return self.latency_s + size * 8e-6 / self.down_mbps

    def fate(self, part: str, update: str) -> Fate:
        """Fate of an update, by its id: a pure function of the seed."""
        draw = random.Random(f"{self.seed} {part} {update}")
        if draw.random() < self.lost:
            return "lost"
        return "in time" if draw.random() < self.in_time else "late"

    def _slowness(self, replica: int) -> float:
        return self.slowness[replica % len(self.slowness)]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and is_number(value) and value > 0


class Throttle:
    """Makes a worker's real steps as slow as on a slower machine, and adds up the time they took."""

    def __init__(self, fleet: SimulatedWorkers | None = None) -> None:
        """:param fleet: whose `slowness` and `pace_s` hold here; none for a machine's own speed."""
        self.fleet = fleet or SimulatedWorkers()
        self.steps = 0
        self.busy_s = 0.0

    @contextmanager
    def step(self, replica: int) -> Iterator[None]:
        """Around one local step."""
        begin = time.monotonic()
        yield
        time.sleep(self.fleet.rest_s(replica, time.monotonic() - begin))
        self.steps += 1
        self.busy_s += time.monotonic() - begin
