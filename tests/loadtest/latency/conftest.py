"""Accounts, answers and samples as a run would book them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.lab.profile import Link
from loadtest.latency.run import Sample, sample_of
from tests.conftest import Run


def account(**changes: Any) -> dict[str, Any]:
    """`Result.as_json()` of a sweep over two hosts that computed for 4 ms each."""
    hosts = [{"name": f"host-{i}", "blocks": [i - 1], "compute_ms": 4.0, "queue_ms": 0.5} for i in (1, 2)]
    return {
        "mode": "sweep",
        "output_bytes": 8,
        "output_tokens": 8,
        "text": "\0" * 8,
        "stopped": False,
        "sweeps": 1,
        "hops": 3,
        "wire_bytes": [1250, 2500, 1250],
        "wire_bytes_total": 5000,
        "compute_ms": 8.0,
        "batches": 1,
        "hosts": hosts,
        "output_hex": "00" * 8,
        **changes,
    }


@pytest.fixture
def bench(onesweep: Run) -> Run:
    """Run `bench wan` on a bundle."""
    return lambda bundle, *options: onesweep("bench", "wan", "--checkpoint", bundle, *options)


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """A sample of a given latency on two hosts, 10 ms and 1 Mbit/s apart; with `error`, a failed one."""

    network = SimpleNamespace(nodes=("router", "host-1", "host-2"), link=lambda *_: Link(10.0, 1.0))

    def make(latency_ms: float = 100.0, error: str = "", **changes: Any) -> Sample:
        answer: dict[str, Any] = {"latency_ms": latency_ms, "first_byte_ms": latency_ms, "account": account(**changes)}
        return sample_of(SimpleNamespace(network=network), 0, 0, {"error": error} if error else answer)  # type: ignore[arg-type]

    return make
