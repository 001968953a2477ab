"""The floor of a request: the time that these links and hosts take at least, whatever serves on them.

    floor = one-way delays on the critical path + serialisation of the payload on it + recorded compute

If a sweep's candidates travel in batches, only the serialisation and compute that no other batch can hide count, as if
every host were its own machine.

It excludes TCP/IP and HTTP/2 headers, queues, gRPC, protobuf, Python and waiting for a processor. Delay and
serialisation follow the profile, with the least delay under jitter; compute is the hosts' own record of this very
request.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from loadtest.lab.profile import ROUTER, Link


@dataclass(frozen=True)
class BookedCost:
    """Cost of one request, as the servers recorded it."""

    mode: str
    sweeps: int
    wire_bytes: tuple[int, ...]  # payload of each hop of a sweep; the largest if sweeps differ, in `steps` the mean
    wire_bytes_total: int
    host_ms: float  # compute on the hosts
    local_ms: float = 0.0  # compute of the local model on the router
    slowest_ms: float = 0.0  # compute on the host with the most
    batches: int = 1  # batches of a sweep's candidates, on which hosts worked in parallel

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Read `Result.as_json()`, or that of pictures."""
        times_ms = [host["compute_ms"] for host in record["hosts"]]
        host_ms = sum(times_ms)
        return cls(
            record["mode"],
            record["sweeps"],
            tuple(record["wire_bytes"]),
            record["wire_bytes_total"],
            host_ms,
            max(record["compute_ms"] - host_ms, 0.0),
            max(times_ms, default=0.0),
            max(record.get("batches", 1), 1),
        )


@dataclass(frozen=True)
class Floor:
    """Milliseconds that only other links, another schedule or faster compute could save."""

    delay_ms: float
    serialisation_ms: float
    compute_ms: float

    @property
    def total_ms(self) -> float:
        return self.delay_ms + self.serialisation_ms + self.compute_ms


def floor_of(account: BookedCost, hosts: Sequence[str], link: Callable[[str, str], Link]) -> Floor:
    """The floor of one request, from its account, the `hosts` in ring order, and the links between them."""
    if not account.sweeps:
        return Floor(0.0, 0.0, account.host_ms + account.local_ms)
    # the hops of one sweep, all of them on the critical path
    path = [(ROUTER, hosts[0]), *itertools.pairwise(hosts), (hosts[-1], ROUTER)]
    wires = [link(*ends) for ends in path]
    rates = list(map(_rate_mbps, wires))
    if account.mode in ("ar", "ar-speculative", "steps"):  # the last host starts the next trip
        back = [link(hosts[-1], hosts[0])] if len(hosts) > 1 else []  # a single host passes the byte to itself
        delay_ms, serialisation_ms = _round_the_ring(account, wires, back)
    else:
        delay_ms = account.sweeps * sum(map(least_delay_ms, wires))
        serialisation_ms = least_serialisation_ms(account, rates)
    if account.batches == 1:
        return Floor(delay_ms, serialisation_ms, account.host_ms + account.local_ms)
    # Equal batches pass links and hosts in a row, each handling one batch at a time: one batch passes them all,
    # and the others wait behind it at the slowest.
    later = 1 - 1 / account.batches
    host_ms, wires_ms = account.host_ms / account.batches, serialisation_ms / account.batches
    slowest_ms = max(map(wire_ms, account.wire_bytes, rates), default=0.0) * account.sweeps
    if slowest_ms > account.slowest_ms:
        wires_ms += later * min(slowest_ms, serialisation_ms)
    else:
        host_ms += later * account.slowest_ms
    return Floor(delay_ms, wires_ms, host_ms + account.local_ms)


def _round_the_ring(account: BookedCost, wires: Sequence[Link], back: Sequence[Link]) -> tuple[float, float]:
    """The last host starts the next trip at the first host, so the request waits only for the last trip's way to the
    router. In `steps` the router also hears of every trip."""
    (out, *inner, home), steps = wires, account.sweeps
    within_ms = sum(map(least_delay_ms, inner))
    ends_ms = least_delay_ms(out) + least_delay_ms(home)
    delay_ms = ends_ms + steps * within_ms + (steps - 1) * sum(map(least_delay_ms, back))
    # at most the largest event came back with each further step; the rest went round, at best on the
    # fastest link, but for one message of the largest size that each inner link carried for certain, or of `steps`
    # one of the mean size for each trip
    beside = (steps - 1) * account.wire_bytes[-1] if account.wire_bytes and account.mode != "steps" else 0
    certain = account.wire_bytes[1:-1] if len(account.wire_bytes) == len(inner) + 2 else ()
    if account.mode == "steps":
        certain = tuple(steps * size for size in certain)
    serialisation_ms = sum(wire_ms(size, _rate_mbps(wire)) for size, wire in zip(certain, inner, strict=False))
    rest = account.wire_bytes_total - beside - sum(certain)
    fastest = max(map(_rate_mbps, (*wires, *back)))
    return delay_ms, serialisation_ms + wire_ms(rest, fastest)


def least_serialisation_ms(account: BookedCost, rates_mbps: Sequence[float]) -> float:
    """The least time that the recorded payload can take on consecutive hops with these rates.

    The account has the largest payload of each hop and the sum over all sweeps. With a single sweep or equal rates this
    determines the time; otherwise the undetermined part counts as sent over the fastest hops.
    """
    if len(account.wire_bytes) != len(rates_mbps):
        return wire_ms(account.wire_bytes_total, max(rates_mbps))
    left = account.wire_bytes_total - sum(account.wire_bytes)
    time_ms = sum(wire_ms(size, rate) for size, rate in zip(account.wire_bytes, rates_mbps, strict=True))
    by_rate = sorted(zip(rates_mbps, account.wire_bytes, strict=True), reverse=True)
    for rate, largest in by_rate:
        more = min(left, (account.sweeps - 1) * largest)
        time_ms += wire_ms(more, rate)
        left -= more
    return time_ms


def least_delay_ms(link: Link) -> float:
    """The one-way delay, with jitter its least value."""
    return link.delay_ms - link.jitter_ms


def wire_ms(size: int, rate_mbps: float) -> float:
    """Milliseconds for `size` bytes at a rate in Mbit/s; 0 for an infinite one."""
    return max(size, 0) * 8 / (rate_mbps * 1000)


def _rate_mbps(link: Link) -> float:
    return math.inf if link.rate_mbps is None else link.rate_mbps
