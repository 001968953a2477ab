"""What lies between a worker and its coordinator, and how long a file takes on it."""

from __future__ import annotations

from dataclasses import dataclass

from stages.errors import ConfigError
from trainer.planning.traffic import SEGMENT_BYTES, wire_bytes
from trainer.rounds.fleet import is_above_zero, is_number

FIRST_WINDOW = 10
"""Segments that TCP sends before it hears anything, and again after a pause (RFC 6928, RFC 5681 4.1)."""


@dataclass(frozen=True)
class Link:
    """As a worker has it."""

    up_mbps: float
    """Megabits (10^6) a second of IP packets, towards the coordinator."""
    down_mbps: float
    latency_ms: float
    """One way."""

    def __post_init__(self) -> None:
        for name in ("up_mbps", "down_mbps"):
            if not is_above_zero(value := getattr(self, name)):
                raise ConfigError(f"{name} must be a finite number above 0, not {value!r}")
        if not is_number(self.latency_ms) or self.latency_ms < 0:
            raise ConfigError(f"latency_ms must be a finite number of at least 0, not {self.latency_ms!r}")

    @property
    def round_trip_s(self) -> float:
        return 2 * self.latency_ms / 1000

    def up_s(self, payload: int) -> float:
        """Seconds until the last byte of a file of `payload` bytes has left the worker."""
        return self._sending_s(payload, self.up_mbps)

    def down_s(self, payload: int) -> float:
        """Likewise, from the coordinator."""
        return self._sending_s(payload, self.down_mbps)

    def _sending_s(self, payload: int, mbps: float) -> float:
        """At the link's rate, and the gaps of TCP's slow start: windows of 10, 20, 40 ... segments, one a round trip,
        until they fill it (RFC 5681, 3.1)."""
        a_byte_s = 8e-6 / mbps
        left, window, gaps_s = wire_bytes(payload), float(FIRST_WINDOW * SEGMENT_BYTES), 0.0
        whole_s = left * a_byte_s
        while left > window and window * a_byte_s < self.round_trip_s:
            gaps_s += self.round_trip_s - window * a_byte_s
            left, window = left - window, 2 * window
        return whole_s + gaps_s


LINKS = {
    "lan": Link(1000, 1000, 0.25),
    "links-20": Link(100, 100, 10),
    "links-60": Link(100, 100, 30),
    "links-150": Link(100, 100, 75),
    "consumer": Link(20, 20, 20),
}
"""By the names that the emulated WAN gives them; see docs/wan.md."""
