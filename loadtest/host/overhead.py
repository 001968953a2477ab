"""The benchmark `overhead`: a real deployment on loopback against the same work in this process."""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from onesweep.loadtest.host.benchmark import PROMPT, RING, Benchmark, TextDiffers, ring_of
from onesweep.loadtest.host.settings import OverheadSettings
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.pipeline import InProcess, Work
from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.client.client import Client, Result
from onesweep.serving.router.topology import Topology
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError
from onesweep.stages.host.parts import plan_host

TARGET_HOSTS = RING
# Most milliseconds of overhead a sweep, for a ring of three; a byte is a sweep of `ar`.
TARGETS_MS = {"sweep": 8.0, "chunked": 8.0, "ar": 2.5}

_HEADER = (
    *("mode", "hosts", "p50 ms", "p95 ms", "compute ms", "in-process ms"),
    *("overhead ms/sweep", "target", "met", "x compute", "x in-process"),
)


@dataclass(frozen=True)
class OverheadSample:
    """One request, served and computed here."""

    latency_ms: float  # at the client, from the call to the end of the account
    router_ms: float  # the router's own figure
    compute_ms: float  # the hosts' own figure
    in_process_ms: float
    sweeps: int

    @property
    def overhead_ms(self) -> float:
        """Milliseconds a sweep that were not arithmetic on a host."""
        return (self.latency_ms - self.compute_ms) / self.sweeps


@dataclass(frozen=True)
class OverheadFigures:
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
    target_ms_per_sweep: float | None  # None where no target is set
    met: bool | None


class OverheadBench(Benchmark[OverheadSettings, list[OverheadFigures]]):
    """`onesweep bench overhead`: each mode on each ring."""

    @property
    def announcement(self) -> str:
        return f"{self.settings.requests} requests of each mode, {self.settings.max_bytes} bytes each ..."

    def check(self) -> None:
        self.rings()

    def rings(self) -> list[Topology]:
        """The rings to measure. Raises InputError or CheckpointError."""
        s = self.settings
        models = _models(s.checkpoint).values()
        room = min(read_manifest(path).text_architecture.positions for path in models) - len(PROMPT)
        if not 1 <= s.max_bytes <= room:
            raise InputError(f"--bytes must be 1 to {room}, what the context leaves after the prompt: {s.max_bytes}")
        parts = plan_host(s.checkpoint, (0,)).parts
        return [ring_of(s.checkpoint, hosts) for hosts in s.hosts or sorted({1, min(TARGET_HOSTS, parts)})]

    def measure(self) -> list[OverheadFigures]:
        """Raises TextDiffers when a served text is not the model's."""
        s, figures = self.settings, []
        torch.set_num_threads(1)  # as the hosts
        floor, models = InProcess(s.checkpoint), _models(s.checkpoint)
        modes = [mode for mode in TARGETS_MS if ("ar" if mode == "ar" else "chain") in models]
        for ring in self.rings():
            with temporary_deployment(ring, s.checkpoint), Client(ring.router) as client:
                samples = _samples(client, floor, modes, s)
            figures += [figures_of(mode, len(ring.hosts), samples[mode]) for mode in modes]
        return figures

    def table(self, result: list[OverheadFigures]) -> str:
        return aligned(_HEADER, [_row(f) for f in result])

    def record(self, result: list[OverheadFigures]) -> dict[str, Any]:
        return {
            "bench": "overhead",
            "requests": self.settings.requests,
            "max_bytes": self.settings.max_bytes,
            "prompt": PROMPT.decode(),
            "seeds": list(range(self.settings.requests)),
            "figures": [asdict(f) for f in result],
        }


def _models(checkpoint: Path) -> dict[str, Path]:
    """Directories of the bundle's models that answer requests."""
    bundle = find_bundle(checkpoint)
    return {name: path for name, path in (("chain", bundle.chain), ("ar", bundle.ar)) if path is not None}


def _samples(
    client: Client, floor: InProcess, modes: list[str], settings: OverheadSettings
) -> dict[str, list[OverheadSample]]:
    """Interleaved, in an order that rotates: a slow moment of the machine falls on every mode."""
    samples: dict[str, list[OverheadSample]] = {mode: [] for mode in modes}
    for mode in modes:
        _sample(client, floor, Work(mode, PROMPT, settings.max_bytes, 0))
    for i in range(settings.requests):
        turn = i % len(modes)
        for mode in modes[turn:] + modes[:turn]:
            samples[mode].append(_sample(client, floor, Work(mode, PROMPT, settings.max_bytes, i)))
    return samples


def _sample(client: Client, floor: InProcess, work: Work) -> OverheadSample:
    begin = time.perf_counter()
    result = client.generate(work.prompt, mode=work.mode, max_bytes=work.max_bytes, seed=work.seed)
    middle = time.perf_counter()
    text = floor.generate(work)
    end = time.perf_counter()
    check_text(work, result, text)
    return OverheadSample(
        (middle - begin) * 1000, result.latency_ms, result.compute_ms, (end - middle) * 1000, result.sweeps
    )


def check_text(work: Work, result: Result, text: bytes) -> None:
    """Raises TextDiffers, with both texts, unless what was served is what the model gives here."""
    if result.output != text:
        raise TextDiffers(
            f"mode {work.mode}, seed {work.seed}: serving changed the text\n"
            f"  served:     {result.output!r}\n  in process: {text!r}"
        )


def figures_of(mode: str, hosts: int, samples: list[OverheadSample]) -> OverheadFigures:
    """Medians, and whether the target is met."""
    latency = sorted(s.latency_ms for s in samples)
    overhead = statistics.median(s.overhead_ms for s in samples)
    target = TARGETS_MS[mode] if hosts == TARGET_HOSTS else None
    return OverheadFigures(
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


def _row(f: OverheadFigures) -> tuple[str, ...]:
    milliseconds = (f.latency_p50_ms, f.latency_p95_ms, f.compute_ms, f.in_process_ms)
    return (
        *(f.mode, str(f.hosts)),
        *(f"{value:.1f}" for value in milliseconds),
        f"{f.overhead_ms_per_sweep:.2f}",
        "-" if f.target_ms_per_sweep is None else f"{f.target_ms_per_sweep:g}",
        "-" if f.met is None else "yes" if f.met else "no",
        *(f"{ratio:.2f}" for ratio in (f.latency_to_compute, f.latency_to_in_process)),
    )
