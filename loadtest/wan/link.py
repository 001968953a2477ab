"""One directed link between two nodes, as a user describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from stages.errors import InputError

MTU = 1500
"""Bytes of the largest IP packet on every link."""
DEFAULT_QUEUE_MS = 100.0
MAX_MS = 60_000.0
MAX_RATE_MBPS = 100_000.0


class ProfileError(InputError):
    """A profile, or a link in one, that cannot be emulated."""


@dataclass(frozen=True)
class Link:
    """What happens to packets from one node to another. Raises ProfileError for values that make no link."""

    delay_ms: float = 0.0
    """Propagation, one way."""
    rate_mbps: float | None = None
    """Megabits (10^6) of IP packets a second; None for no limit."""
    queue_ms: float | None = None
    """What waits for the rate before packets are dropped, as time (100 ms unless queue_kb is given)."""
    queue_kb: float | None = None
    """The same in kilobytes (10^3). One of the two."""
    jitter_ms: float = 0.0
    """Each packet's delay is drawn evenly from delay_ms +/- jitter_ms; order is kept."""
    loss: float = 0.0
    """Probability that a packet vanishes before the queue."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), optional=field.default is None)
        if not 0 <= self.delay_ms <= MAX_MS:
            raise ProfileError(f"delay_ms must be 0 to {MAX_MS:.0f}, not {self.delay_ms:g}")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise ProfileError(f"jitter_ms must be 0 to delay_ms ({self.delay_ms:g}), not {self.jitter_ms:g}")
        if self.rate_mbps is not None and not 0 < self.rate_mbps <= MAX_RATE_MBPS:
            raise ProfileError(
                f"rate_mbps must be more than 0 and at most {MAX_RATE_MBPS:.0f}, not {self.rate_mbps:g}; "
                "leave it out for no limit"
            )
        if not 0 <= self.loss < 1:
            raise ProfileError(f"loss is a probability, 0 or more and less than 1, not {self.loss:g}")
        self._check_queue()

    @property
    def queue_bytes(self) -> int | None:
        """Bytes that wait for the rate at most; None where no rate makes them wait."""
        if self.rate_mbps is None:
            return None
        if self.queue_kb is not None:
            return int(self.queue_kb * 1000)
        queue_ms = DEFAULT_QUEUE_MS if self.queue_ms is None else self.queue_ms
        return max(MTU, int(queue_ms * self.rate_mbps * 125))

    def _check_queue(self) -> None:
        for name, value in (("queue_ms", self.queue_ms), ("queue_kb", self.queue_kb)):
            if value is not None and value <= 0:
                raise ProfileError(f"{name} must be more than 0, not {value:g}")
            if value is not None and self.rate_mbps is None:
                raise ProfileError(f"{name} says what waits for the rate: give rate_mbps, too, or leave it out")
        if self.queue_ms is not None and self.queue_kb is not None:
            raise ProfileError("give the queue as queue_ms or as queue_kb, not both")
        if self.queue_kb is not None and self.queue_kb * 1000 < MTU:
            raise ProfileError(f"queue_kb = {self.queue_kb:g} does not hold one packet of {MTU} bytes")


def check_number(name: str, value: object, optional: bool = False) -> None:
    """Raises ProfileError unless `value` is a finite number (or None, if that will do)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ProfileError(f"{name} must be a number, not {value!r}")
