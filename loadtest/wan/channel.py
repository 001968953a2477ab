"""The arithmetic of a directed link: when a packet that comes now is delivered, or that it is dropped."""

from __future__ import annotations

import random

from loadtest.wan.link import Link

DROPPED = -1


class Channel:
    """A link in use: a queue that empties at the link's rate, then a delay. Times are nanoseconds of one clock.

    A packet leaves when all before it have left and its own bits are out; it is delivered a delay later, never before
    one that was sent earlier.
    """

    __slots__ = (
        "carried",
        "carried_bytes",
        "delay_ns",
        "free_ns",
        "jitter_ns",
        "last_ns",
        "link",
        "loss",
        "lost",
        "ns_per_byte",
        "overflowed",
        "queue_ns",
        "random",
    )

    def __init__(self, link: Link, seed: str) -> None:
        self.link = link
        self.ns_per_byte = 8000 / link.rate_mbps if link.rate_mbps else 0.0
        self.queue_ns = round((link.queue_bytes or 0) * self.ns_per_byte)
        self.delay_ns = round(link.delay_ms * 1e6)
        self.jitter_ns = round(link.jitter_ms * 1e6)
        self.loss = link.loss
        self.random = random.Random(seed).random
        self.free_ns = 0
        self.last_ns = 0
        self.carried = self.carried_bytes = self.lost = self.overflowed = 0

    def admit(self, now_ns: int, size: int) -> int:
        """Delivery time of a packet of `size` bytes that comes at `now_ns`, or DROPPED."""
        if self.loss and self.random() < self.loss:
            self.lost += 1
            return DROPPED
        start_ns = self.free_ns if self.free_ns > now_ns else now_ns
        departure_ns = start_ns + round(size * self.ns_per_byte)
        if departure_ns - now_ns > self.queue_ns and start_ns > now_ns:
            self.overflowed += 1
            return DROPPED
        self.free_ns = departure_ns
        delivery_ns = departure_ns + self.delay_ns
        if self.jitter_ns:
            delivery_ns += round((2 * self.random() - 1) * self.jitter_ns)
        if delivery_ns < self.last_ns:
            delivery_ns = self.last_ns
        self.last_ns = delivery_ns
        self.carried += 1
        self.carried_bytes += size
        return delivery_ns

    def counters(self) -> dict[str, int]:
        """Packets so far: `carried` (and their bytes), `lost` at random, `overflowed` a full queue."""
        return {
            "carried": self.carried,
            "carried_bytes": self.carried_bytes,
            "lost": self.lost,
            "overflowed": self.overflowed,
        }
