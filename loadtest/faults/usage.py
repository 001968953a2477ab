"""Memory and open descriptors of processes, sampled every second."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import psutil

EVERY_S = 1.0
WARM_UP_S = 60.0  # of a process's life, before what it holds is expected to stay
CLIENTS = "clients"  # the one process whose memory may grow: it keeps every answer


@dataclass
class ProcessUsage:
    """One process from its start, or the run's, to its end."""

    name: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.at_s[-1] - self.at_s[0] if self.at_s else 0.0

    @property
    def warm(self) -> int:
        """Index of the first sample after the warm-up; the last one where there is none."""
        found = (i for i, at_s in enumerate(self.at_s) if at_s - self.at_s[0] >= WARM_UP_S)
        return next(found, len(self.at_s) - 1)


@contextlib.contextmanager
def sampling(pids: Callable[[], Mapping[str, int]]) -> Iterator[list[ProcessUsage]]:
    """Sample the processes that `pids` names at the time, for the length of a `with` block."""
    usages: list[ProcessUsage] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(EVERY_S):
            for name, pid in dict(pids()).items():
                with contextlib.suppress(psutil.Error):
                    _sample(usages, name, psutil.Process(pid))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield usages
    finally:
        ended.set()
        thread.join()


def _sample(usages: list[ProcessUsage], name: str, process: psutil.Process) -> None:
    rss_mb, descriptors = process.memory_info().rss / 2**20, process.num_fds()
    if not rss_mb:  # it has ended, and nobody waited for it
        return
    usage = next((usage for usage in usages if (usage.name, usage.pid) == (name, process.pid)), None)
    if usage is None:
        usages.append(usage := ProcessUsage(name, process.pid))
    usage.at_s.append(time.monotonic())
    usage.rss_mb.append(rss_mb)
    usage.descriptors.append(descriptors)
