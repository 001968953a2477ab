"""Memory and open descriptors of processes, sampled every second, and whether they grow."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

EVERY_S = 1.0
WARM_UP_S = 60.0  # of a process's life, before what it holds is expected to stay
MEMORY_FLOOR_KB, DESCRIPTOR_FLOOR = 100.0, 0.1  # a minute: growth below is not worth a word
CLIENTS = "clients"  # the one process whose memory may grow: it keeps every answer
NORMAL_95 = 1.96
LEAST_SAMPLES = 10


@dataclass(frozen=True)
class Slope:
    """A slope a minute, and half the width of its 95 % interval."""

    per_minute: float
    margin: float

    def grows(self, floor: float) -> bool:
        """True where it is surely above 0, and above `floor`."""
        return self.per_minute - self.margin > 0 and self.per_minute > floor


def slope_of(at_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """The slope of a straight line through samples, by least squares; None of fewer than LEAST_SAMPLES."""
    n, x, y = len(at_s), np.asarray(at_s, float), np.asarray(values, float)
    if n < LEAST_SAMPLES or not (x - x[0]).any():
        return None
    x, y = x - x.mean(), y - y.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residuals = y - slope * x
    squares = float(residuals @ residuals)
    # samples that follow each other are alike, so they count as n (1 - r) / (1 + r) independent ones, where r is the
    # correlation of each residual with the next (Bayley and Hammersley 1946)
    alike = float(residuals[1:] @ residuals[:-1]) / squares if squares else 0.0
    alike = min(max(alike, 0.0), 0.99)
    margin = NORMAL_95 * math.sqrt(squares / (n - 2) / spread * (1 + alike) / (1 - alike))
    return Slope(slope * 60, margin * 60)


@dataclass
class ProcessLife:
    """One process from its start, or the run's, to its end."""

    name: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    rss_kb: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.at_s[-1] - self.at_s[0] if self.at_s else 0.0

    @property
    def memory_slope(self) -> Slope | None:
        """KB a minute, once it is warm."""
        return self._slope(self.rss_kb)

    @property
    def descriptor_slope(self) -> Slope | None:
        return self._slope(self.descriptors)

    def _slope(self, values: list[float]) -> Slope | None:
        warm = [i for i, at_s in enumerate(self.at_s) if at_s - self.at_s[0] >= WARM_UP_S]
        return slope_of([self.at_s[i] for i in warm], [values[i] for i in warm])


def longest_lives(lives: Iterable[ProcessLife]) -> dict[str, ProcessLife]:
    """The longest life of each name."""
    found: dict[str, ProcessLife] = {}
    for life in lives:
        if life.name not in found or life.seconds > found[life.name].seconds:
            found[life.name] = life
    return found


def growth_of(lives: Iterable[ProcessLife]) -> list[str]:
    """A sentence for each figure that surely grows."""
    words = []
    for life in lives:
        figures = (
            ("KB of memory", life.memory_slope, MEMORY_FLOOR_KB),
            ("descriptors", life.descriptor_slope, DESCRIPTOR_FLOOR),
        )
        for what, slope, floor in figures:
            if life.name != CLIENTS and slope is not None and slope.grows(floor):
                words.append(f"{life.name} grows by {slope.per_minute:.1f} ± {slope.margin:.1f} {what} a minute")
    return words


@contextlib.contextmanager
def sampling(pids: Callable[[], Mapping[str, int]]) -> Iterator[list[ProcessLife]]:
    """Sample the processes that `pids` names at the time, for the length of a `with` block."""
    lives: list[ProcessLife] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(EVERY_S):
            for name, pid in dict(pids()).items():
                with contextlib.suppress(psutil.Error):
                    _sample(lives, name, psutil.Process(pid))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lives
    finally:
        ended.set()
        thread.join()


def _sample(lives: list[ProcessLife], name: str, process: psutil.Process) -> None:
    rss_kb, descriptors = process.memory_info().rss / 1024, process.num_fds()
    if not rss_kb:  # it has ended, and nobody waited for it
        return
    life = next((life for life in lives if (life.name, life.pid) == (name, process.pid)), None)
    if life is None:
        lives.append(life := ProcessLife(name, process.pid))
    life.at_s.append(time.monotonic())
    life.rss_kb.append(rss_kb)
    life.descriptors.append(descriptors)
