"""The least time to a first token that the booked bytes and arithmetic allow, for the best schedule of the pieces.

Booked are sums over all pieces, so each piece is given the share of its symbols. That is a little less than the truth
for the last ones, which attend to more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.wan_bench.floor import Wire


@dataclass(frozen=True)
class Booked:
    """What one request took, as the servers booked it."""

    wire_bytes: tuple[int, ...]
    """Payload to each host, and of the result."""
    host_ms: tuple[float, ...]
    """Arithmetic of each host."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> Booked:
        """From `Result.as_json()`."""
        return cls(tuple(record["wire_bytes"]), tuple(host["compute_ms"] for host in record["hosts"]))


def floor_ms(booked: Booked, links: Sequence[Wire], shares: Sequence[float]) -> float:
    """Time of the best schedule where every host is a machine of its own.

    Pieces go in order through link, host, link, host ..., each of which serves one at a time (a permutation flow shop);
    a piece is at the next as soon as it is done here, on a link after its delay. What comes back is one message.

    :param links: to each host, and back to the router.
    :param shares: of the whole that each piece is; (1.0,) for a prompt in one hop.
    """
    ready = [0.0] * len(shares)
    for link, size, host_ms in zip(links, booked.wire_bytes, booked.host_ms, strict=False):
        ready = [end + _delay_ms(link) for end in _one_at_a_time(ready, [_wire_ms(size, link) * s for s in shares])]
        ready = _one_at_a_time(ready, [host_ms * share for share in shares])
    return ready[-1] + _wire_ms(booked.wire_bytes[-1], links[-1]) + _delay_ms(links[-1])


def shared_floor_ms(booked: Booked, links: Sequence[Wire], cores: int) -> float:
    """What no schedule undercuts where all hosts share `cores` of one machine: no host computes before the first piece
    is there, and none after the result has left."""
    return _delay_ms(links[0]) + sum(booked.host_ms) / cores + _delay_ms(links[-1])


def _one_at_a_time(ready: Sequence[float], takes: Sequence[float]) -> list[float]:
    ends, free = list[float](), 0.0
    for begin, took in zip(ready, takes, strict=True):
        free = max(begin, free) + took
        ends.append(free)
    return ends


def _delay_ms(link: Wire) -> float:
    return link.delay_ms - link.jitter_ms


def _wire_ms(size: int, link: Wire) -> float:
    return size * 8 / ((math.inf if link.rate_mbps is None else link.rate_mbps) * 1000)
