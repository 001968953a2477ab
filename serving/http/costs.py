"""What a text cost, for the answer's `onesweep.accounting`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from serving.client import HostShare, Result
from serving.v1 import router_pb2


def costs_of(result: Result) -> dict[str, Any]:
    """The fields of a Result, without the text."""
    record = result.as_json()
    del record["text"]
    return {**record, "host_seconds": result.host_seconds, "complete": True}


class Tally:
    """The costs of a text that was cut short, from the trips that had come back by then."""

    def __init__(self) -> None:
        self.sweeps = self.wire_bytes_total = 0
        self.latency_ms = 0.0
        self.shares: dict[str, HostShare] = {}

    def add(self, trip: router_pb2.Trip) -> None:
        self.sweeps += 1
        self.wire_bytes_total += trip.wire_bytes
        self.latency_ms = trip.end_ms
        for host in trip.hosts:
            before = self.shares.get(host.name) or HostShare(host.name, [], 0.0, 0.0)
            self.shares[host.name] = HostShare(
                host.name, [], before.compute_ms + host.compute_ms, before.queue_ms + host.queue_ms
            )

    def costs(self, prompt_bytes: int, output: bytes) -> dict[str, Any]:
        compute_ms = sum(share.compute_ms for share in self.shares.values())
        return {
            "prompt_bytes": prompt_bytes,
            "output_bytes": len(output),
            "output_hex": output.hex(),
            "sweeps": self.sweeps,
            "wire_bytes_total": self.wire_bytes_total,
            "latency_ms": round(self.latency_ms, 3),
            "compute_ms": round(compute_ms, 3),
            "hosts": [asdict(share) for share in self.shares.values()],
            "host_seconds": compute_ms / 1000,
            "complete": False,
        }
