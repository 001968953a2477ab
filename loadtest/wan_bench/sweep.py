"""One sweep for a picture: where it went, and what each part of its way took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.wan_bench.arms import Arm
from loadtest.wan_bench.floor import Course
from loadtest.wan_bench.turns import Sample


def single_sweep(profile: str, course: Course, arm: Arm, samples: Sequence[Sample]) -> dict[str, Any] | None:
    """The request of median latency, if the links were warm and it took one sweep; None if not."""
    good = sorted((sample for sample in samples if not sample.error), key=lambda sample: sample.latency_ms)
    if not good or arm.idle_s:
        return None
    middle = good[(len(good) - 1) // 2]
    path, account = course.sweep_path(), middle.account
    if account is None or account["sweeps"] != 1 or len(account["wire_bytes"]) != len(path):
        return None
    return {
        "profile": profile,
        "mode": arm.choice.label,
        "length": arm.length.count,
        "unit": arm.length.unit,
        "seed": middle.seed,
        "latency_ms": middle.latency_ms,
        "wire_bytes": account["wire_bytes"],
        "hosts": account["hosts"],
        "hops": [_hop(course, *pair) for pair in path],
    }


def waterfall(sweep: dict[str, Any]) -> list[tuple[str, str, float]]:
    """(what, part, milliseconds) of one sweep in the order of its way; they add up to its latency.

    Delay and serialisation are the profile's, queue and compute the hosts'. What remains is known only as a sum, so it
    stands at the end as one piece.
    """
    hosts = {host["name"]: host for host in sweep["hosts"]}
    steps = []
    for hop, size in zip(sweep["hops"], sweep["wire_bytes"], strict=True):
        steps.append((f"{hop['source']} → {hop['destination']}", "delay", hop["delay_ms"]))
        took_ms = size * 8 / (hop["rate_mbps"] * 1000) if hop["rate_mbps"] else 0.0
        steps.append((f"{size:,} bytes", "serialisation", took_ms))
        if host := hosts.get(hop["destination"]):
            steps.append((f"{host['name']} queue", "queue", host["queue_ms"]))
            steps.append((f"{host['name']} compute", "compute", host["compute_ms"]))
    rest_ms = sweep["latency_ms"] - sum(took_ms for _, _, took_ms in steps)
    return [*steps, ("gRPC, Python, TCP", "rest", rest_ms)]


def _hop(course: Course, source: str, destination: str) -> dict[str, Any]:
    wire = course.link(source, destination)
    return {
        "source": source,
        "destination": destination,
        "delay_ms": wire.delay_ms - wire.jitter_ms,
        "rate_mbps": wire.rate_mbps,
    }
