"""What serving costs on top of the model: a real deployment on loopback against the same work in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.inprocess import InProcess, Work
from loadtest.table import aligned
from serving.client import Client, Result
from serving.deployment import temporary_deployment
from serving.ports import free_port_block
from serving.topology import Topology, local_topology
from stages.bundle import find_bundle
from stages.errors import InputError, OnesweepError
from stages.manifest import read_manifest
from stages.parts import plan_host

PROMPT = b"The old man looked at the sea and said that "
TARGET_HOSTS = 3
TARGETS_MS = {"sweep": 15.0, "chunked": 15.0, "ar": 5.0}
"""Most milliseconds of overhead a sweep, for a ring of three; a byte is a sweep of `ar`."""

_HEADER = (
    *("mode", "hosts", "p50 ms", "p95 ms", "compute ms", "in-process ms"),
    *("overhead ms/sweep", "target", "met", "x compute", "x in-process"),
)


class TextDiffers(OnesweepError):
    """Serving changed the text: nothing that is measured then means anything."""


@dataclass(frozen=True)
class OverheadSettings:
    """What `onesweep bench overhead` is told."""

    checkpoint: Path
    hosts: tuple[int, ...]
    requests: int = 20
    """Requests of each mode, after one that warms up."""
    max_bytes: int = 128


@dataclass(frozen=True)
class Sample:
    """One request, served and computed here."""

    latency_ms: float
    """At the client, from the call to the end of the account."""
    router_ms: float
    """As the router booked it."""
    compute_ms: float
    """As the hosts booked it."""
    in_process_ms: float
    sweeps: int

    @property
    def overhead_ms(self) -> float:
        """Milliseconds a sweep that were not arithmetic on a host."""
        return (self.latency_ms - self.compute_ms) / self.sweeps


@dataclass(frozen=True)
class ModeFigures:
    """Medians over the requests of one mode on one deployment, milliseconds."""

    mode: str
    hosts: int
    requests: int
    sweeps: int
    latency_p50_ms: float
    latency_p95_ms: float
    router_p50_ms: float
    compute_ms: float
    in_process_ms: float
    overhead_ms_per_sweep: float
    latency_to_compute: float
    latency_to_in_process: float
    target_ms_per_sweep: float | None
    """None where no target is set."""
    met: bool | None


def check_settings(settings: OverheadSettings) -> list[Topology]:
    """Everything that can be refused before anything is started. Returns the rings to measure.

    Raises InputError or CheckpointError.
    """
    if settings.requests < 1:
        raise InputError(f"--requests must be at least 1, not {settings.requests}")
    parts = plan_host(settings.checkpoint, (0,)).parts
    room = min(_context_bytes(settings.checkpoint).values()) - len(PROMPT)
    if not 1 <= settings.max_bytes <= room:
        raise InputError(f"--bytes must be 1 to {room}, what the context leaves after the prompt: {settings.max_bytes}")
    hosts = settings.hosts or tuple(sorted({1, min(TARGET_HOSTS, parts)}))
    return [local_topology(n, parts, settings.checkpoint, free_port_block(n + 1) + 1) for n in hosts]


def measure_overhead(settings: OverheadSettings) -> Iterator[ModeFigures]:
    """Figures of each mode on each ring. Raises OnesweepError; TextDiffers when a served text is not the model's."""
    topologies = check_settings(settings)
    torch.set_num_threads(1)  # as the hosts
    floor = InProcess(settings.checkpoint)
    modes = _modes(settings.checkpoint)
    for topology in topologies:
        with (
            temporary_deployment(topology, settings.checkpoint) as deployment,
            Client(deployment.topology.router) as client,
        ):
            samples = _samples(client, floor, modes, settings)
        yield from (figures_of(mode, len(topology.hosts), samples[mode]) for mode in modes)


def overhead_table(figures: list[ModeFigures]) -> str:
    return aligned(_HEADER, [_row(f) for f in figures])


def overhead_record(settings: OverheadSettings, figures: list[ModeFigures]) -> dict[str, Any]:
    """Settings and figures for a JSON file."""
    return {
        "bench": "overhead",
        "requests": settings.requests,
        "max_bytes": settings.max_bytes,
        "prompt": PROMPT.decode(),
        "seeds": list(range(settings.requests)),
        "figures": [asdict(f) for f in figures],
    }


def _context_bytes(checkpoint: Path) -> dict[str, int]:
    bundle = find_bundle(checkpoint)
    models = {"chain": bundle.chain, "ar": bundle.ar}
    return {k: read_manifest(path).architecture.positions for k, path in models.items() if path is not None}


def _modes(checkpoint: Path) -> list[str]:
    """Those that the bundle has weights for."""
    bundle = find_bundle(checkpoint)
    return (["sweep", "chunked"] if bundle.chain else []) + (["ar"] if bundle.ar else [])


def _samples(client: Client, floor: InProcess, modes: list[str], settings: OverheadSettings) -> dict[str, list[Sample]]:
    """Interleaved, in an order that rotates: a slow moment of the machine falls on every mode."""
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    for mode in modes:
        _sample(client, floor, Work(mode, PROMPT, settings.max_bytes, 0))
    for i in range(settings.requests):
        turn = i % len(modes)
        for mode in modes[turn:] + modes[:turn]:
            samples[mode].append(_sample(client, floor, Work(mode, PROMPT, settings.max_bytes, i)))
    return samples


def _sample(client: Client, floor: InProcess, work: Work) -> Sample:
    begin = time.perf_counter()
    result = client.generate(work.prompt, mode=work.mode, max_bytes=work.max_bytes, seed=work.seed)
    middle = time.perf_counter()
    text = floor.generate(work)
    end = time.perf_counter()
    check_text(work, result, text)
    return Sample((middle - begin) * 1000, result.latency_ms, result.compute_ms, (end - middle) * 1000, result.sweeps)


def check_text(work: Work, result: Result, text: bytes) -> None:
    """Raises TextDiffers, with both texts, unless what was served is what the model gives here."""
    if result.output != text:
        raise TextDiffers(
            f"mode {work.mode}, seed {work.seed}: serving changed the text\n"
            f"  served:     {result.output!r}\n  in process: {text!r}"
        )


def figures_of(mode: str, hosts: int, samples: list[Sample]) -> ModeFigures:
    """Medians, and whether the target is met."""
    latency = sorted(s.latency_ms for s in samples)
    overhead = statistics.median(s.overhead_ms for s in samples)
    target = TARGETS_MS[mode] if hosts == TARGET_HOSTS else None
    return ModeFigures(
        mode=mode,
        hosts=hosts,
        requests=len(samples),
        sweeps=samples[0].sweeps,
        latency_p50_ms=statistics.median(latency),
        latency_p95_ms=latency[-(-95 * len(latency) // 100) - 1],
        router_p50_ms=statistics.median(s.router_ms for s in samples),
        compute_ms=statistics.median(s.compute_ms for s in samples),
        in_process_ms=statistics.median(s.in_process_ms for s in samples),
        overhead_ms_per_sweep=overhead,
        latency_to_compute=statistics.median(s.latency_ms / s.compute_ms for s in samples),
        latency_to_in_process=statistics.median(s.latency_ms / s.in_process_ms for s in samples),
        target_ms_per_sweep=target,
        met=None if target is None else overhead <= target,
    )


def _row(f: ModeFigures) -> tuple[str, ...]:
    milliseconds = (f.latency_p50_ms, f.latency_p95_ms, f.compute_ms, f.in_process_ms)
    return (
        *(f.mode, str(f.hosts)),
        *(f"{value:.1f}" for value in milliseconds),
        f"{f.overhead_ms_per_sweep:.2f}",
        "-" if f.target_ms_per_sweep is None else f"{f.target_ms_per_sweep:.0f}",
        "-" if f.met is None else "yes" if f.met else "no",
        *(f"{ratio:.2f}" for ratio in (f.latency_to_compute, f.latency_to_in_process)),
    )
