"""Real steps on machines that are not there: each takes as long as it would on a slower one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.rounds.fleet import Fleet


class Pace:
    """One worker's; it also knows how long its steps took."""

    def __init__(self, fleet: Fleet | None = None) -> None:
        """:param fleet: whose `slowness` and `pace_s` hold here; none for a machine's own speed."""
        self.fleet = fleet or Fleet()
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
