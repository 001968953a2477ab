"""Memory and open descriptors of every process, a sample a second."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from loadtest.chaos.slope import Slope, slope_of

EVERY_S = 1.0
WARM_UP_S = 60.0
"""Of a process's life, before what it holds is expected to stay."""


@dataclass
class Life:
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


class Gauge:
    """Samples whatever process has a name at the time."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self.lives: list[Life] = []
        self._pids = pids
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `end`."""
        while not self._ended.wait(EVERY_S):
            for name, pid in dict(self._pids()).items():
                with contextlib.suppress(psutil.Error):
                    self._sample(name, psutil.Process(pid))

    def end(self) -> None:
        self._ended.set()

    def _sample(self, name: str, process: psutil.Process) -> None:
        rss_kb, descriptors = process.memory_info().rss / 1024, process.num_fds()
        if not rss_kb:  # it has ended, and nobody waited for it
            return
        life = next((life for life in self.lives if (life.name, life.pid) == (name, process.pid)), None)
        if life is None:
            self.lives.append(life := Life(name, process.pid))
        life.at_s.append(time.monotonic())
        life.rss_kb.append(rss_kb)
        life.descriptors.append(descriptors)


@contextlib.contextmanager
def gauging(pids: Callable[[], Mapping[str, int]]) -> Iterator[Gauge]:
    """A gauge that samples for the length of a `with` block."""
    gauge = Gauge(pids)
    thread = threading.Thread(target=gauge.run, daemon=True)
    thread.start()
    try:
        yield gauge
    finally:
        gauge.end()
        thread.join()
