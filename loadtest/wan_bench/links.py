"""What the lab's links really do: round trips on plain sockets against what the profile promises."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.table import aligned
from loadtest.wan.lab import Lab
from loadtest.wan_bench.floor import Course, Pair, Wire
from stages.errors import OnesweepError

ECHO = [sys.executable, "-P", "-m", "loadtest.wan_bench.echo"]
PORT = 7600
ROUND_TRIPS = 10
TIMEOUT_S = 120.0

_HEADER = ("link", "profile", "nominal ms", "p50 ms", "least ms", "most ms", "over nominal ms")


@dataclass(frozen=True)
class LinkFigures:
    """Round trips of one pair of nodes, milliseconds. Nominal: both one-way delays; 64 bytes add next to nothing."""

    profile: str
    source: str
    destination: str
    nominal_ms: float
    p50_ms: float
    least_ms: float
    most_ms: float


def ring_pairs(course: Course) -> list[Pair]:
    """Every pair of nodes that a ring uses, once."""
    pairs = course.sweep_path()
    if len(course.hosts) > 1:
        pairs.append((course.hosts[-1], course.hosts[0]))
    return list({tuple(sorted(pair)): pair for pair in pairs}.values())


def measure_links(lab: Lab, course: Course) -> list[LinkFigures]:
    """Round trips between the nodes of the ring. Raises OnesweepError when one does not reach the other."""
    pairs = ring_pairs(course)
    with contextlib.ExitStack() as servers:
        for node in sorted({destination for _, destination in pairs}):
            servers.enter_context(_echo_server(lab, node))
        return [_measure(lab, pair, course.link) for pair in pairs]


def links_table(figures: Sequence[LinkFigures]) -> str:
    rows = [
        (
            *(f"{f.source} - {f.destination}", f.profile),
            *(f"{value:.2f}" for value in (f.nominal_ms, f.p50_ms, f.least_ms, f.most_ms, f.p50_ms - f.nominal_ms)),
        )
        for f in figures
    ]
    return aligned(_HEADER, rows)


def links_record(figures: Sequence[LinkFigures]) -> list[dict[str, Any]]:
    return [asdict(f) for f in figures]


def _measure(lab: Lab, pair: Pair, link: Callable[[str, str], Wire]) -> LinkFigures:
    source, destination = pair
    ping = lab.command(source, [*ECHO, "ping", lab.address(destination), str(PORT), str(ROUND_TRIPS)])
    try:
        done = subprocess.run(ping, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OnesweepError(f"{source} gets no answer from {destination} over the emulated links") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OnesweepError(f"{source} does not reach {destination} over the emulated links: {last}")
    times: list[float] = json.loads(done.stdout)
    nominal_ms = link(*pair).delay_ms + link(destination, source).delay_ms
    return LinkFigures(
        lab.profile.name, source, destination, nominal_ms, statistics.median(times), min(times), max(times)
    )


@contextlib.contextmanager
def _echo_server(lab: Lab, node: str) -> Iterator[None]:
    command = lab.command(node, [*ECHO, "serve", lab.address(node), str(PORT)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise OnesweepError(f"cannot listen in {node} of the emulated network")
            yield
        finally:
            server.kill()
